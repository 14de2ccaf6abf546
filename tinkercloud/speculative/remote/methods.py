"""What is called over gRPC: one bidirectional stream of messages each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from tinkercloud.speculative.remote import draft_pb2, target_pb2


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """Of a service: its name, what clients send, and what they get."""

    path: str
    request: type[Message]
    answer: type[Message]

    def call(
        self,
        channel: grpc.Channel,
        outgoing: Iterator[Any],
        metadata: tuple[tuple[str, str], ...],
    ) -> Any:
        method = channel.stream_stream(
            self.path,
            request_serializer=self.request.SerializeToString,
            response_deserializer=self.answer.FromString,
        )
        return method(outgoing, metadata=metadata)


DRAFT = StreamMethod("/tinkercloud.draft.DraftWorker/Draft", draft_pb2.ToWorker, draft_pb2.ToEngine)
VERIFY = StreamMethod(
    "/tinkercloud.target.TargetWorker/Verify", target_pb2.ToTarget, target_pb2.FromTarget
)
