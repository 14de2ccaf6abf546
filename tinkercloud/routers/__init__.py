"""HTTP in, service calls, HTTP out: one file for each noun."""

from tinkercloud.routers import (
    accounts,
    anthropic,
    billing,
    checkpoints,
    downloads,
    futures,
    health,
    models,
    openai,
    openai_completions,
    rest,
    sampling,
    sessions,
    traces,
    training,
)

ROUTERS = (
    accounts.router,
    billing.router,
    sessions.router,
    traces.router,
    traces.signed,
    models.router,
    training.router,
    checkpoints.router,
    downloads.router,
    downloads.signed,
    sampling.router,
    futures.router,
    rest.router,
    anthropic.router,
    openai.router,
    openai_completions.router,
    health.router,
)
