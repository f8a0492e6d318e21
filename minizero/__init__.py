"""minizero: data parallelism and ZeRO-1, 2 and 3 from scratch, with the same bits."""

from . import functional, nn, ring
from .autograd import Tensor, no_grad
from .comm import CollectiveError, Communicator
from .data_parallel import DataParallel
from .engine import Engine
from .optim import SGD, Adam, Optimizer
from .tensor_file import CheckpointError
from .weights import load_weights, save_weights
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

__version__ = "0.1.0"

STAGES: tuple[type[Engine], ...] = (DataParallel, Zero1, Zero2, Zero3)

__all__ = [
    "SGD", "STAGES", "Adam", "CheckpointError", "CollectiveError", "Communicator", "DataParallel", "Engine",
    "Optimizer", "Tensor", "Zero1", "Zero2", "Zero3", "functional", "load_weights", "nn", "no_grad", "ring",
    "save_weights",
]  # fmt: skip
