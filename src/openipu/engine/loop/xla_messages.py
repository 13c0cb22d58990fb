"""The messages in which XLA describes compiled programs and their memory, as far as reports read them.

XLA gives them as protocol buffers and has no Python package for that.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

_PACKAGE: Final = "openipu.xla"
_FIELDS: Final = {
    "Location": "4 instruction int64",
    "Logical": "1 id int64, 3 defined_at Location",
    "Assigned": "1 id int64, 2 offset int64, 3 size int64",
    "Allocation": "2 size int64, 3 is_thread_local bool, 5 is_parameter bool, 6 parameter int64, 7 is_result bool, "
    "9 assigned *Assigned, 12 is_constant bool",
    "Assignment": "1 buffers *Logical, 3 allocations *Allocation",
    "Metadata": "2 op_name string",
    "Instruction": "1 name string, 2 opcode string, 7 metadata Metadata, 9 parameter int64, 35 id int64, "
    "36 operands *int64, 38 called *int64",
    "Computation": "2 instructions *Instruction, 5 id int64, 6 root int64",
    "Sequence": "1 ids *int64",
    "Entry": "1 key int64, 2 value Sequence",
    "Schedule": "1 sequences *Entry",
    "Module": "3 computations *Computation, 6 entry int64, 7 schedule Schedule",
}
"""Number, name and type of each field, as in xla/service/hlo.proto. A star stands for any number of values."""


def parsed(message: str, content: bytes) -> Any:
    """The message of this name with this content."""
    found = _classes()[message]()
    found.ParseFromString(content)
    return found


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    types = descriptor_pb2.FieldDescriptorProto
    plain = {"int64": types.TYPE_INT64, "bool": types.TYPE_BOOL, "string": types.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(name="openipu/xla.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for number, name, kind in (field.split() for field in fields.split(", ")):
            one = kind.removeprefix("*")
            field = described.field.add(name=name, number=int(number), type=plain.get(one, types.TYPE_MESSAGE))
            field.label = types.LABEL_OPTIONAL if one == kind else types.LABEL_REPEATED
            if one not in plain:
                field.type_name = f".{_PACKAGE}.{one}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}
