"""HTTP in, service calls, HTTP out: one file for each noun."""

from tinkercloud.routers import (
    checkpoints,
    futures,
    health,
    models,
    rest,
    sampling,
    sessions,
    training,
)

ROUTERS = (
    sessions.router,
    models.router,
    training.router,
    checkpoints.router,
    sampling.router,
    futures.router,
    rest.router,
    health.router,
)
