"""The gRPC contract between router and shard: messages as `pb`, stub and servicer as `pb_grpc`."""

from text_generation_proto.v1 import generate_pb2 as pb
from text_generation_proto.v1 import generate_pb2_grpc as pb_grpc

__all__ = ["pb", "pb_grpc"]
