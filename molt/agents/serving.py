"""The chat server of a runner, and the session of a judge on it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from molt.agents.episode import EpisodeContext
from molt.chat.session import Session
from molt.types import PolicyFailure

if TYPE_CHECKING:
    from molt.chat.server import ChatServer


class Serving:
    """A runner with a chat server, one for all its episodes."""

    _server: "asyncio.Task[ChatServer] | None" = None

    @asynccontextmanager
    async def judge_url(self, context: EpisodeContext) -> AsyncIterator[str]:
        """The URL of a judge while the block lasts. Raises `InfraFailure` if the judge could not answer."""
        server = await self.server()
        judge = judge_of(context, failed=asyncio.Event())
        url = server.open(judge)
        try:
            yield url
        except PolicyFailure:
            if judge.failure is None:
                raise
        finally:
            server.close(url)
        if judge.failure is not None:
            raise judge.failure

    async def server(self) -> "ChatServer":
        """The server; the first caller starts it."""
        if self._server is None:
            from molt.chat.server import ChatServer  # an agent file is also loaded where nothing is served

            self._server = asyncio.create_task(ChatServer().__aenter__())
        try:
            return await asyncio.shield(self._server)
        except Exception:
            self._server = None  # the next episode tries again
            raise


def judge_of(context: EpisodeContext, failed: asyncio.Event) -> Session:
    """A session on the engines of the episode that records nothing. failed: set when it cannot answer."""
    return Session(
        context.chat_renderer,
        context.call_model,
        call_freely=context.call_freely,
        record=False,
        max_len=context.max_len,
        max_new_tokens=context.max_new_tokens,
        failed=failed,
    )
