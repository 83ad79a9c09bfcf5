"""Turns the exceptions of calls into gRPC errors."""

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import torch

from text_generation_shard.errors import BatchError, ModelError, RankError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # Generic in the stubs only.
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Interceptor, _Handler = grpc.aio.ServerInterceptor, grpc.RpcMethodHandler


class ExceptionInterceptor(_Interceptor):
    """Turns exceptions into INTERNAL with the exception's text. Calls `on_fatal` after an error
    that leaves the device unusable."""

    def __init__(self, on_fatal: Callable[[], None]) -> None:
        self._on_fatal = on_fatal

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a call: unary, or a stream in both directions."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        wire = handler.request_deserializer, handler.response_serializer
        stream: Any = handler.stream_stream
        if stream is not None:

            async def guarded_stream(requests: Any, context: Any) -> Any:
                try:
                    async for response in stream(requests, context):
                        yield response
                except Exception as error:
                    await self._fail(method, error, context)

            return grpc.stream_stream_rpc_method_handler(guarded_stream, *wire)
        assert handler.unary_unary is not None
        call = handler.unary_unary

        async def guarded(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except Exception as error:
                await self._fail(method, error, context)

        return grpc.unary_unary_rpc_method_handler(guarded, *wire)

    async def _fail(self, method: str, error: Exception, context: Any) -> None:
        if isinstance(error, BatchError | ModelError):
            # The router logs it as an error: one ERROR line per failure.
            logger.warning("%s: %s", method, error)
        elif isinstance(error, RankError):
            # The failed rank logs the reason; `on_final` logs a final error.
            if not error.is_final:
                logger.warning("%s: %s", method, error)
        else:
            logger.error("%s failed", method, exc_info=error)
            if _is_fatal(error):
                self._on_fatal()
        await context.abort(grpc.StatusCode.INTERNAL, str(error) or type(error).__name__)


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than lack of memory makes the CUDA context unusable."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
