"""One life of the server process: what `tinkercloud serve` runs, without sockets."""

import asyncio
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import Process, in_process
from tests.simulation.schedule import USERS
from tinkercloud.app import create_app
from tinkercloud.config import Config

if TYPE_CHECKING:
    from tests.simulation.world import World


WORK = ("bring back", "free ", "lane ", "snapshot ", "run ", "late ", "publish ")


class Server:
    """is_up: it listens. failure: what ended its start. met_trouble: the disk refused a write."""

    def __init__(self, world: "World"):
        self._world = world
        self.process = Process("server")
        self.is_up = False
        self.met_trouble = False
        self.failure: BaseException | None = None
        world.engine.serve(self.process)
        config = Config(
            data_dir=world.disk.folder,
            backend="fake",
            gap_grace_s=world.schedule.gap_grace_s,
            hold_s=10.0,
            idle_model_s=world.schedule.idle_model_s,
            archive_bytes=world.schedule.archive_bytes,
            archive_days=world.schedule.archive_days,
            session_ttl_s=world.schedule.session_ttl_s,
            published_bytes=world.schedule.published_bytes,
            drain_s=world.schedule.drain_s,
            metrics_users=USERS[0],
            result_ttl_s=1e7,
            capture_ttl_s=1e7,
            reward_hosts="rewards.example:80",
        )
        self._app = create_app(config, world.engine, connector=world.connector)
        self._stopping = asyncio.Event()
        self._task = in_process(self.process, world.loop.create_task, self._live())

    @property
    def services(self) -> Any:
        return self._app.state.services

    @property
    def is_idle(self) -> bool:
        """No request has work left, and no model is being brought back, written or freed."""
        if self.services.tasks.num_pending:
            return False
        names = {task.get_name() for task in self.process.unfinished()}
        return not any(name.startswith(WORK) for name in names)

    async def _live(self) -> None:
        try:
            async with self._app.router.lifespan_context(self._app):
                self.is_up = True
                self._world.network.listen(self._app, self.process)
                await self._stopping.wait()
                self._world.network.refuse()
                await self.services.stop_work()
                self._world.network.hang_up()
                self.is_up = False
        except Exception as error:  # noqa: BLE001 - the process ends by it
            self.failure = error
            self.is_up = False

    async def started_or_ended(self) -> None:
        def waits() -> bool:
            return not self.is_up and not self._task.done() and self.process.alive

        while waits():  # noqa: ASYNC110 - a process may end without a word
            await asyncio.sleep(0.01)

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    async def stop(self) -> None:
        """Raises AssertionError where it does not end in time."""
        self._stopping.set()
        deadline = asyncio.get_running_loop().time() + 60.0
        while not self._task.done() and self.process.alive:
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError("the server does not stop")
            await asyncio.sleep(0.05)
