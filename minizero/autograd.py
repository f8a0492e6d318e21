"""How does a `Tensor` remember how it was made, and run backward once?

    y = x @ w;  z = relu(y);  loss = sum(z)          each operation adds one node, numbered as it is created

    node 3  sum    inputs: node 2          backward visits 3, 2, 1: a node's number is larger than those of
    node 2  relu   inputs: node 1          its inputs, so when a node's turn comes, all that used its output
    node 1  matmul inputs: x, w            have already added their share to its gradient

Depth-first order would be right as well, but finishes all weights last. In creation order a layer's weights
are done when its own nodes are done, and their gradients can be reduced and freed while backward goes on.

A node keeps arrays it alone needs, and *parameters*, never a parameter's array: it asks for `parameter.data`
when it runs. Under ZeRO-3 that array is gone by then and has been gathered anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from .backend import Array, dtype_of, to_host, working, xp
from .frozen import Hold, freeze

Operand: TypeAlias = Any  # a Tensor, an array of `xp` or NumPy, a number
Share: TypeAlias = Callable[[Array], Array]  # gradient of the result -> gradient of one input
Axis: TypeAlias = "int | tuple[int, ...] | None"  # of a reduction: one axis, several, or (None) all
Gradients = tuple[Array | None, ...]  # one for each input of a node; None where there is nothing to say

operations: dict[str, Callable[..., Tensor]] = {}  # each operation of functional.py, by name

_numbers = itertools.count()
_recording = True


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    """A method of Tensor that calls the operation `name`; `swapped` for `2 - tensor` and its like."""

    def method(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if swapped:
            return operations[name](args[0], self)
        return operations[name](self, *args, **options)

    method.__name__ = name
    method.__doc__ = f"See `functional.{name}`."
    return method


class Node:
    """One operation that ran: where gradients go next, and how they are computed.

    `targets` has, per input, the Node or leaf Tensor that its gradient belongs to (None: no gradient wanted).
    `parameters` are those among the inputs (or whose views are), frozen ones included.
    """

    __slots__ = ("backward", "hold", "name", "number", "parameters", "targets")

    def __init__(self, inputs: tuple[Tensor, ...], backward: Callable[[Array], Gradients], name: str) -> None:
        self.number = next(_numbers)
        self.targets = tuple((x.node or x) if x.requires_grad else None for x in inputs)
        self.parameters = tuple(dict.fromkeys(x.parameter for x in inputs if x.parameter is not None))
        self.backward: Callable[[Array], Gradients] | None = backward
        others = (x for x in inputs if x.node is None and x.parameter is None)
        self.hold: Hold | None = Hold(dict.fromkeys([*self.parameters, *others]))
        self.name = name


class Tensor:
    """An array, and how it was made.

    Args:
        data: an array, a Tensor, or anything else `xp.array` takes; its values are copied. float32, float64,
            bfloat16, integers or bools.
        requires_grad: a leaf whose gradient `backward` adds to `grad` (floating dtypes only).
    """

    __array_ufunc__ = None  # `np.float64(2) * tensor` asks the Tensor, not NumPy
    __slots__ = ("__weakref__", "_data", "grad", "holders", "node", "requires_grad")
    version = 0  # changes by an engine: see frozen.py

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.requires_grad, self.holders = requires_grad, 0
        self.grad: Array | None = None
        self.node: Node | None = None
        self._data: Array = xp.array(data.data if isinstance(data, Tensor) else data)
        if requires_grad and not is_floating(self._data.dtype):
            raise TypeError(f"only floating-point tensors can require gradients, this one is {self._data.dtype}")
        if requires_grad:
            dtype_of(self._data.dtype)

    @classmethod
    def of(cls, array: Tensor | Array) -> Tensor:
        """A Tensor of this very array, not of a copy; what is a Tensor already is returned."""
        if isinstance(array, Tensor):
            return array
        self = Tensor.__new__(Tensor)
        self._data = array if isinstance(array, xp.ndarray) else xp.asarray(array)
        self.requires_grad, self.grad, self.node, self.holders = False, None, None, 0
        return self

    @property
    def parameter(self) -> Tensor | None:
        """The parameter that this is, or is a view of; None for all other tensors."""
        return None

    @property
    def data(self) -> Array:
        """The array itself, not a copy. Read-only as long as a backward may need it: see frozen.py."""
        return self._data

    def room(self) -> Array | None:
        """An array that its gradient may be written to, to save a copy later; who asks must write. None: anywhere."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.data.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        made = f", made by {self.node.name}" if self.node else ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({self.data!r}{made})"

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values as a NumPy array: the array itself under NumPy, a copy from a GPU."""
        return to_host(self.data)

    def item(self) -> float:
        """The only value of a tensor with one element, as a Python number."""
        if self.size != 1:
            raise ValueError(f"item() needs exactly one element, this tensor has shape {self.shape}")
        return to_host(self.data).item()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def detach(self) -> Tensor:
        """A Tensor of the same values that remembers nothing."""
        return Tensor(self)

    def backward(self, gradient: Any = None) -> None:
        """Add to `grad` of each leaf that requires it. See `backward`."""
        backward(self, gradient)

    __add__ = _operator("add")
    __radd__ = _operator("add", swapped=True)
    __sub__ = _operator("sub")
    __rsub__ = _operator("sub", swapped=True)
    __mul__ = _operator("mul")
    __rmul__ = _operator("mul", swapped=True)
    __truediv__ = _operator("div")
    __rtruediv__ = _operator("div", swapped=True)
    __matmul__ = _operator("matmul")
    __rmatmul__ = _operator("matmul", swapped=True)
    __neg__ = _operator("neg")
    __pow__ = _operator("pow")
    __getitem__ = _operator("index")
    sum = _operator("sum")
    mean = _operator("mean")
    max = _operator("max")
    exp = _operator("exp")
    log = _operator("log")
    sqrt = _operator("sqrt")
    tanh = _operator("tanh")
    astype = _operator("astype")

    def reshape(self, *shape: Any) -> Tensor:
        """See `functional.reshape`; the shape may be given as one tuple or as several integers."""
        return operations["reshape"](self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    def transpose(self, *axes: Any) -> Tensor:
        """See `functional.transpose`; all axes, as one tuple or as several integers; none: reversed."""
        return operations["transpose"](self, axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes)

    def swapaxes(self, first: int, second: int) -> Tensor:
        """This tensor with two axes exchanged."""
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return self.transpose(axes)

    @property
    def T(self) -> Tensor:  # noqa: N802  (the name that NumPy and PyTorch use)
        return self.transpose()


def is_floating(dtype: Any) -> bool:
    return working(np.dtype(dtype)).kind == "f"


@contextmanager
def no_grad() -> Iterator[None]:
    """Nothing is recorded inside: results do not require gradients."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


def recording() -> bool:
    """Are operations being recorded, that is: are we outside `no_grad`?"""
    return _recording


def record(result: Tensor, inputs: tuple[Tensor, ...], backward: Callable[[Array], Gradients], name: str) -> Tensor:
    """`result`, remembering that `backward` turns its gradient into one per input, if any input wants one."""
    if _recording and any(x.requires_grad for x in inputs):
        result.requires_grad = True
        result.node = Node(inputs, backward, name)
        if result.parameter is None:
            freeze(result.data)
    return result


class Watcher:
    """What `backward` reports as it goes. The default leaves gradients in `grad`; an engine listens instead."""

    def reached(self, parameters: list[Tensor]) -> None:
        """Before anything runs: all parameters that backward will come across, frozen ones included."""

    def needed(self, parameter: Tensor) -> None:
        """A node is about to run that may use `parameter.data`. Called before each such node."""

    def ran(self) -> None:
        """A node has run, what it finished was reported, and all arrays that it alone needed are gone."""

    def finished(self, leaf: Tensor, gradient: Array | None) -> None:
        """The last node that used `leaf` has run; `gradient` is None for a frozen or untouched one."""
        if gradient is not None:
            # a copy: the array may also be another leaf's gradient, the caller's, or a view that repeats one number
            leaf.grad = xp.array(gradient) if leaf.grad is None else xp.asarray(leaf.grad + gradient)


def backward(root: Tensor, gradient: Any = None, watcher: Watcher | None = None) -> None:
    """Compute the gradient of `root` for every leaf that it depends on; report each leaf as it finishes.

    Args:
        root: what is differentiated. The graph behind it is used up: a second backward through it is an error.
        gradient: gradient of `root` itself, of its shape; 1 where it is left out, for which `root` must have
            exactly one element.
        watcher: hears of parameters as they are reached, needed and finished.

    A leaf's gradient has the leaf's shape and the dtype it was computed in: float32 also for a bfloat16 leaf.
    """
    watcher = watcher or Watcher()
    seed = _seed(root, gradient)
    if root.node is None:  # the root is itself a leaf
        watcher.reached([root] if root.parameter is not None else [])
        watcher.finished(root, seed)
        return

    nodes = nodes_behind(root.node)
    users: dict[Tensor, int] = {}  # leaf or parameter -> nodes still to run that use it
    for node in nodes:
        for leaf in _leaves(node):
            users[leaf] = users.get(leaf, 0) + 1
    watcher.reached([leaf for leaf in users if leaf.parameter is not None])

    held: dict[Node | Tensor, Array] = {root.node: seed}  # gradients that have been computed, but not yet used
    while nodes:
        node = nodes.pop()
        for parameter in node.parameters:
            watcher.needed(parameter)
        _run(node, held)
        leaves = _leaves(node)
        node.targets, node.parameters = (), ()
        for leaf in leaves:
            users[leaf] -= 1
            if not users[leaf]:
                watcher.finished(leaf, held.pop(leaf, None))
        watcher.ran()


def _seed(root: Tensor, gradient: Any) -> Array:
    if not root.requires_grad:
        raise ValueError("backward: this tensor does not depend on anything that requires a gradient")
    if gradient is None:
        if root.size != 1:
            raise ValueError(f"backward: a tensor of shape {root.shape} is not a single number: pass gradient=")
        return xp.ones(root.shape, working(root.dtype))
    seed = gradient.data if isinstance(gradient, Tensor) else gradient
    seed = xp.asarray(seed, dtype=working(root.dtype))
    if seed.shape != root.shape:
        raise ValueError(f"backward: gradient has shape {seed.shape}, the tensor has {root.shape}")
    return seed


def nodes_behind(last: Node) -> list[Node]:
    """All nodes that `last` depends on and `last` itself, oldest first."""
    seen, todo = {last}, [last]
    while todo:
        node = todo.pop()
        if node.backward is None:
            raise RuntimeError(
                f"backward ran already through this graph (at {node.name}), and its memory is gone: "
                "compute the result again before a second backward"
            )
        fresh = [t for t in node.targets if isinstance(t, Node) and t not in seen]
        seen.update(fresh)
        todo.extend(fresh)
    return sorted(seen, key=lambda node: node.number)


def _leaves(node: Node) -> list[Tensor]:
    """The leaf tensors and the parameters that `node` uses, each once."""
    leaves = [t for t in node.targets if isinstance(t, Tensor)]
    return list(dict.fromkeys([*leaves, *node.parameters]))


def _run(node: Node, held: dict[Node | Tensor, Array]) -> None:
    """Run one node: its gradient is taken from `held`, those of its inputs are added there."""
    step, node.backward = node.backward, None  # the closure, and the arrays in it, go when this returns
    if node.hold:
        node.hold.check(node.name)
    node.hold = None
    gradient = held.pop(node, None)
    if gradient is None or step is None:  # nothing that used its output had anything to say
        return
    for target, share in zip(node.targets, step(gradient), strict=True):
        if target is not None and share is not None:
            # not in place: `share` may be the very array that another input was given
            held[target] = held[target] + share if target in held else share
