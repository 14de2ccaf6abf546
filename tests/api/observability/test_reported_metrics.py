"""What training scripts report of their runs."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Api, serving
from tests.api.observability.test_console_data import events_of
from tinkercloud.routers.console import data as console_data
from tinkercloud.services.results import reported_curves

Point = tuple[int, dict[str, float]]


async def report(api: Api, model_id: str, *points: Point, status: int = 204) -> str:
    bodies = [{"step": step, "metrics": metrics} for step, metrics in points]
    answer = await api.post(f"training_runs/{model_id}/metrics", points=bodies)
    assert answer.status_code == status, answer.text
    return answer.text


async def reported(api: Api, model_id: str, **query: int) -> list[dict[str, Any]]:
    answer = await api.get(f"training_runs/{model_id}/metrics", **query)
    assert answer.status_code == 200, answer.text
    return answer.json()["points"]


async def test_what_is_reported_is_read_again_also_after_a_restart(tmp_path: Path) -> None:
    points = [(step, {"reward": step / 7, "länge": -3.0}) for step in (1, 2, 5)]
    async with serving(tmp_path) as api:
        model_id = await api.model()
        await report(api, model_id, *points[:2])
        await report(api, model_id, *points[2:])
    async with serving(tmp_path) as api:
        found = await reported(api, model_id)
    assert [(point["step"], point["metrics"]) for point in found] == points


async def test_a_step_that_is_reported_again_is_added_to_and_comes_last(api: Api) -> None:
    model_id = await api.model()
    await report(api, model_id, (1, {"reward": 0.5, "kl": 0.1}), (2, {"reward": 0.7}))
    before = await reported(api, model_id)
    await report(api, model_id, (1, {"reward": 0.6, "length": 9}))
    (changed,) = await reported(api, model_id, after=before[-1]["number"])
    assert (changed["step"], changed["metrics"]) == (1, {"reward": 0.6, "kl": 0.1, "length": 9})
    assert [point["step"] for point in await reported(api, model_id)] == [2, 1]


async def test_pages_of_one_report_leave_nothing_out(api: Api) -> None:
    model_id = await api.model()
    await report(api, model_id, *((step, {"reward": 0.0}) for step in range(7)))
    steps: list[int] = []
    after = 0
    while page := await reported(api, model_id, after=after, limit=3):
        steps += [point["step"] for point in page]
        after = page[-1]["number"]
    assert steps == list(range(7))


async def test_the_console_gets_what_was_reported_beside_the_curve(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_data, "NUM_EVENTS", 1)
    monkeypatch.setattr(console_data, "INTERVAL_S", 0.0)
    monkeypatch.setattr(console_data, "MAX_REPORTED", 2)
    model_id = await api.model()
    await report(api, model_id, *((step, {"reward": step}) for step in (4, 6, 9)))
    events = events_of((await api.http.get(f"/console/runs/{model_id}/events")).text)
    assert [name for name, _ in events] == ["points", "reported", "reported"]
    points = [point for name, data in events[1:] for point in data]
    assert [(point["step"], point["metrics"]) for point in points] == [
        (step, {"reward": step}) for step in (4, 6, 9)
    ]


@pytest.mark.parametrize(
    "metrics",
    [{}, {"": 1.0}, {"x" * 129: 1.0}, {"reward": "high"}, {"reward": None}],
    ids=["none", "no name", "long name", "text", "null"],
)
async def test_what_is_no_metric_is_refused(api: Api, metrics: dict[str, Any]) -> None:
    model_id = await api.model()
    await report(api, model_id, (1, metrics), status=422)
    await report(api, model_id, (-1, {"reward": 1.0}), status=422)
    assert await reported(api, model_id) == []


async def test_a_number_that_is_not_finite_is_refused(api: Api) -> None:
    path = f"/api/v1/training_runs/{await api.model()}/metrics"
    for number in ("NaN", "Infinity", "1e999"):
        body = '{"points": [{"step": 1, "metrics": {"reward": ' + number + "}}]}"
        headers = {"content-type": "application/json"}
        assert (await api.http.post(path, content=body, headers=headers)).status_code == 422


async def test_the_points_of_the_highest_steps_are_kept(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported_curves, "KEPT_POINTS", 3)
    model_id = await api.model()
    await report(api, model_id, *((step, {"reward": 0.0}) for step in (8, 1, 5, 7, 3)))
    assert sorted(point["step"] for point in await reported(api, model_id)) == [5, 7, 8]


async def test_a_user_who_has_reported_too_much_is_told_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported_curves, "MAX_CHARACTERS", 30)
    model_id = await api.model()
    await report(api, model_id, (1, {"a rather long name of a metric": 1.0}))
    assert "30 characters" in await report(api, model_id, (2, {"reward": 1.0}), status=400)
    bob = api.as_user("bob")
    await report(bob, await bob.model(), (1, {"reward": 1.0}))


async def test_what_was_reported_goes_with_the_results(api: Api) -> None:
    model_id = await api.model()
    await report(api, model_id, (1, {"reward": 1.0}))
    await api.services.reported_metrics.expire(3600.0)
    assert await reported(api, model_id)
    await api.services.reported_metrics.expire(0.0)
    assert await reported(api, model_id) == []


async def test_an_administrator_reads_and_reports_as_the_owner(api: Api) -> None:
    model_id = await api.model()
    eve = api.as_user("eve")
    await report(eve, model_id, (1, {"reward": 1.0}))
    assert [point["step"] for point in await reported(api, model_id)] == [1]
    assert len(await reported(eve, model_id)) == 1
