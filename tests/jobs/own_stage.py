"""The README's own stage has DP's bits. Run on any number of ranks."""

import numpy as np

import minizero as mz
from minizero import functional as F
from minizero import nn, ring
from minizero.backend import Array
from minizero.flat import Unit


class ParameterServer(mz.DataParallel):
    """Rank 0 keeps all moments, makes all updates and tells the others."""

    def mine(self, unit: Unit, vector: Array) -> Array:
        return vector if self.comm.rank == 0 else vector[:0]

    def publish(self, unit: Unit) -> None:
        ring.broadcast(self.comm, unit.weights)


def main() -> None:
    comm = mz.Communicator()
    generator = np.random.default_rng(comm.rank)
    engines = [stage(nn.MLP([7, 13, 5], seed=1), mz.Adam(1e-2), comm) for stage in (mz.DataParallel, ParameterServer)]
    start = engines[0].gather_parameters()
    for _ in range(4):
        x, y = generator.standard_normal((6, 7), np.float32), generator.integers(0, 5, 6)
        for engine in engines:
            engine.backward(F.cross_entropy(engine(x), y))
            engine.step()
    expected, got = (engine.gather_parameters() for engine in engines)
    for name, values in expected.items():
        assert (values.view(np.uint32) == got[name].view(np.uint32)).all(), name
        assert (values != start[name]).any(), f"{name} did not move"
    states = [engine.gather_optimizer_state() for engine in engines]
    for name, state in states[0].items():
        for key, values in state.items():
            assert (values.view(np.uint32) == states[1][name][key].view(np.uint32)).all(), (name, key)
    optimizer = [engine.memory()["optimizer"] for engine in engines]
    assert optimizer[1] == (optimizer[0] if comm.rank == 0 else 0), optimizer


main()
