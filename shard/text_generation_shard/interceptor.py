"""The one door through which a failed call leaves the shard."""

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import torch

from text_generation_shard.errors import BatchError, ModelError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    # Generic in the stubs only.
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Interceptor, _Handler = grpc.aio.ServerInterceptor, grpc.RpcMethodHandler


class ExceptionInterceptor(_Interceptor):
    """Turns exceptions into INTERNAL with the exception's text. After an error that leaves the
    device unusable, `on_fatal` is called so that the process ends instead of limping on."""

    def __init__(self, on_fatal: Callable[[], None]) -> None:
        self._on_fatal = on_fatal

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap unary calls; streaming ones (server reflection) are left alone."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        call = handler.unary_unary

        async def guarded(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except (BatchError, ModelError) as error:
                # The caller reports it as an error; one ERROR line for one failure.
                logger.warning("%s: %s", handler_call_details.method, error)
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            except Exception as error:
                logger.exception("%s failed", handler_call_details.method)
                if _is_fatal(error):
                    self._on_fatal()
                await context.abort(grpc.StatusCode.INTERNAL, str(error) or type(error).__name__)

        return grpc.unary_unary_rpc_method_handler(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than lack of memory poisons the context: nothing after it can work."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
