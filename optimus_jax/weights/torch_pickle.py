"""Evaluates the pickles of PyTorch's files, without Python's module `pickle`.

A pickle is a program for a machine with a stack, and Python's machine can be made to call anything
that can be imported. This one knows the instructions that `torch.save` writes for a mapping of
tensors. It imports nothing and calls nothing: the name of a function stays a name, and what the
three functions that it knows would make is described by a value (decision 20).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

MAX_PICKLE_BYTES = 2 << 20
"""Largest pickle: 10,000 tensors. What is made of it is up to 70 times as large."""
MAX_INTEGER_BYTES = 16
MAX_ITEMS = 16
"""Most arguments of a call, and dimensions of a tensor."""
MAX_NAME_BYTES = 200
"""Longest line of a pickle: the name of a module or of something in it."""

STORAGE_DTYPES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
"""Classes of the module `torch` -> dtype of their elements."""


class RefusedPickleError(ValueError):
    """A pickle is damaged, or does what this module does not allow."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """Something of a module, by its name alone."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A row of numbers that is stored outside the pickle."""

    key: str
    dtype: np.dtype
    num_elements: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A view of a storage. Its numbers count elements; nothing about them has been checked."""

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


ORDERED_DICT = PickledName("collections", "OrderedDict")
TENSOR = PickledName("torch._utils", "_rebuild_tensor_v2")
PARAMETER = PickledName("torch._utils", "_rebuild_parameter")
_MARK = object()
"""Where a group of values begins on the stack."""


def evaluate(data: bytes, start: int = 0) -> tuple[Any, int]:
    """The value of a pickle, and the position after it.

    Returns:
      None, a bool, int, float, str, tuple, list, dict, or one of the classes above, nested in any
      way: tuples may hold themselves many times over, so nothing should walk through all of it.
    Raises:
      RefusedPickleError: an instruction, name or call that is not allowed; bytes that are missing.
    """
    machine = _Machine(data, start)
    try:
        return machine.run(), machine.position
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{error}, at byte {machine.instruction} of a pickle") from None


class _Machine:
    def __init__(self, data: bytes, start: int) -> None:
        self.data, self.position, self.instruction = data, start, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute instructions until STOP, whose value is the last one of the stack."""
        while True:
            self.instruction = self.position
            code = self.take(1)
            if code == b".":
                value = self.pop()
                return value if not self.stack else refuse("values are left over")
            instruction = INSTRUCTIONS.get(code)
            if instruction is None:
                refuse(f"instruction {code!r} is not allowed")
            instruction(self)

    def take(self, size: int) -> bytes:
        """The next bytes of the pickle."""
        part = self.data[self.position : self.position + size]
        if len(part) < size:
            refuse(f"{size} bytes are wanted where {len(part)} are left")
        self.position += size
        return part

    def number(self, form: str) -> Any:
        """The next number, in the form of the module struct."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, size: int) -> str:
        """The next text of some bytes."""
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            return refuse("a text is not UTF-8")

    def line(self) -> str:
        """The text up to the next end of a line."""
        end = self.data.find(b"\n", self.position, self.position + MAX_NAME_BYTES)
        if end < 0:
            refuse("a name does not end")
        text = self.text(end - self.position)
        self.take(1)
        return text

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def pop(self, wanted: type | None = None) -> Any:
        """Take the last value from the stack, which is of a type."""
        if not self.stack or self.stack[-1] is _MARK:
            refuse("the stack is empty")
        value = self.stack.pop()
        if wanted is not None and type(value) is not wanted:
            refuse(f"a {type(value).__name__} stands where a {wanted.__name__} belongs")
        return value

    def top(self, wanted: type) -> Any:
        """The last value of the stack, which is of a type and stays."""
        value = self.pop(wanted)
        self.push(value)
        return value

    def pop_group(self) -> list[Any]:
        """Take all values after the last mark from the stack, and the mark."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                group = self.stack[place + 1 :]
                del self.stack[place:]
                return group
        return refuse("no group of values has begun")

    def push_tuple(self, size: int) -> None:
        """Replace the last values of the stack by a tuple of them."""
        values = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def remember(self, key: int) -> None:
        """Store the last value of the stack, for `recall`."""
        value = self.pop()
        self.push(value)
        self.memo[key] = value

    def recall(self, key: int) -> None:
        """Put a stored value on the stack."""
        if key not in self.memo:
            refuse("a value is recalled that was not stored")
        self.push(self.memo[key])

    def push_integer(self) -> None:
        """An integer of any length."""
        size = self.number("<B")
        if size > MAX_INTEGER_BYTES:
            refuse(f"an integer has {size} bytes")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to the dict that is the last value of the stack."""
        if len(items) % 2:
            refuse("a key has no value")
        target, keys = self.top(dict), items[::2]
        # Hashing other keys could recurse, or take for ever.
        if any(type(key) is not str for key in keys):
            refuse("a key is not a text")
        target.update(zip(keys, items[1::2], strict=True))

    def set_item(self) -> None:
        """Add a key and a value to a dict."""
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def append(self, values: list[Any]) -> None:
        """Add values to the list that is the last value of the stack."""
        self.top(list).extend(values)

    def push_name(self, module: str, name: str) -> None:
        """A name, if this module knows what it means."""
        found = PickledName(module, name)
        is_storage = module == "torch" and name in STORAGE_DTYPES
        if not is_storage and found not in (ORDERED_DICT, TENSOR, PARAMETER):
            label = ascii(f"{module}.{name}")[1:-1]
            refuse(f"the pickle wants to use {label}, which is not allowed")
        self.push(found)

    def push_name_from_stack(self) -> None:
        """A name whose parts are the last values of the stack."""
        name, module = self.pop(str), self.pop(str)
        self.push_name(module[:MAX_NAME_BYTES], name[:MAX_NAME_BYTES])

    def push_storage(self) -> None:
        """A storage, from the tuple that `torch.save` writes for one."""
        match self.pop(tuple):
            case ("storage", PickledName("torch", name), str() as key, str(), int() as size) | (
                "storage",
                PickledName("torch", name),
                str() as key,
                str(),
                int() as size,
                None,
            ):
                if isinstance(size, bool) or size < 0:
                    refuse(f"a storage has {size} elements")
                self.push(PickledStorage(key, STORAGE_DTYPES[name], size))
            case _:
                refuse("a reference out of the pickle is not that of a storage")

    def call(self) -> None:
        """Describe the result of a call of one of the known functions."""
        arguments, function = self.pop(tuple), self.pop(PickledName)
        # A stored tuple can be used many times, so that looking through a long one would take
        # the square of the pickle's length.
        if any(
            len(each) > MAX_ITEMS for each in (arguments, *arguments[:4]) if type(each) is tuple
        ):
            refuse(f"a call has more than {MAX_ITEMS} arguments, or a tensor as many dimensions")
        match function, arguments:
            case PickledName("collections"), ():
                self.push({})
            case PickledName(name="_rebuild_tensor_v2"), (
                PickledStorage() as storage,
                int() as offset,
                tuple() as shape,
                tuple() as strides,
                bool(),
                dict(),
                *metadata,
            ) if metadata in ([], [None]) or (len(metadata) == 1 and metadata[0] == {}):
                if any(type(each) is not int for each in (offset, *shape, *strides)):
                    refuse("an offset, shape or stride is not a whole number")
                self.push(PickledTensor(storage, offset, shape, strides))
            case PickledName(name="_rebuild_parameter"), (
                PickledTensor() as tensor,
                bool(),
                dict(),
            ):
                self.push(tensor)
            case _:
                refuse(f"{function.module}.{function.name} is called with other arguments")

    def build(self) -> None:
        """Drop attributes of a dict, which `torch.save` writes for those of modules."""
        self.pop(dict)
        self.top(dict)


def refuse(what: str) -> NoReturn:
    """Raise RefusedPickleError."""
    raise RefusedPickleError(what)


INSTRUCTIONS: dict[bytes, Callable[[_Machine], object]] = {
    b"\x80": lambda machine: machine.take(1),  # PROTO
    b"\x95": lambda machine: machine.take(8),  # FRAME: a length, which is of no use here
    b"(": lambda machine: machine.push(_MARK),
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"K": lambda machine: machine.push(machine.number("<B")),
    b"M": lambda machine: machine.push(machine.number("<H")),
    b"J": lambda machine: machine.push(machine.number("<i")),
    b"\x8a": _Machine.push_integer,  # LONG1
    b"G": lambda machine: machine.push(machine.number(">d")),
    b"X": lambda machine: machine.push(machine.text(machine.number("<I"))),
    b"\x8c": lambda machine: machine.push(machine.text(machine.number("<B"))),
    b")": lambda machine: machine.push(()),
    b"\x85": lambda machine: machine.push_tuple(1),
    b"\x86": lambda machine: machine.push_tuple(2),
    b"\x87": lambda machine: machine.push_tuple(3),
    b"t": lambda machine: machine.push(tuple(machine.pop_group())),
    b"]": lambda machine: machine.push([]),
    b"a": lambda machine: machine.append([machine.pop()]),
    b"e": lambda machine: machine.append(machine.pop_group()),
    b"}": lambda machine: machine.push({}),
    b"s": _Machine.set_item,
    b"u": lambda machine: machine.set_items(machine.pop_group()),
    b"q": lambda machine: machine.remember(machine.number("<B")),
    b"r": lambda machine: machine.remember(machine.number("<I")),
    b"\x94": lambda machine: machine.remember(len(machine.memo)),  # MEMOIZE
    b"h": lambda machine: machine.recall(machine.number("<B")),
    b"j": lambda machine: machine.recall(machine.number("<I")),
    b"c": lambda machine: machine.push_name(machine.line(), machine.line()),
    b"\x93": _Machine.push_name_from_stack,
    b"Q": _Machine.push_storage,
    b"R": _Machine.call,
    b"b": _Machine.build,
}
"""The instructions that are known, besides STOP."""
