"""HTTP in, service calls, HTTP out: one file for each noun."""

from tinkercloud.routers import (
    accounts,
    anthropic,
    api_document,
    billing,
    captured_chats,
    captures,
    checkpoints,
    docs_site,
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
    verify,
)
from tinkercloud.routers.console import data as console_data
from tinkercloud.routers.console import links as console_links
from tinkercloud.routers.console import page as console_page

# Routes are tried in this order: those that are called most come first.
ROUTERS = (
    sampling.router,
    futures.router,
    training.router,
    accounts.router,
    billing.router,
    sessions.router,
    traces.router,
    traces.signed,
    models.router,
    checkpoints.router,
    downloads.router,
    downloads.signed,
    rest.router,
    captures.router,
    captured_chats.router,
    anthropic.router,
    openai.router,
    verify.router,
    openai_completions.router,
    health.router,
    health.open_router,
    console_links.router,
    console_page.router,
    console_data.router,
    docs_site.router,
    api_document.router,
)
