"""Tools like grpcurl can ask a shard what it offers, once that is switched on."""

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from integration_tests.server import LauncherHandle

SERVICE = "text_generation.v1.TextGenerationService"


def test_reflection_lists_the_service(cramped: LauncherHandle) -> None:
    with grpc.insecure_channel(f"unix://{cramped.uds_path}-0") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        file = database.FindFileContainingSymbol(SERVICE)
    (service,) = file.service
    assert {method.name for method in service.method} == {
        "Info",
        "Health",
        "ServiceDiscovery",
        "ClearCache",
        "CompileGrammar",
        "FilterBatch",
        "Warmup",
        "Prefill",
        "Decode",
    }


def test_it_is_off_by_default(server: LauncherHandle) -> None:
    with grpc.insecure_channel(f"unix://{server.uds_path}-0") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        with pytest.raises(grpc.RpcError) as caught:
            database.get_services()
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
