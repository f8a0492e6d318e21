"""Is memory the same after 100 steps as after 20, without Python's garbage collector?

mpirun -n 2 python tests/jobs/lifetime_steady.py

It must find nothing to do afterwards. (It also empties CPython's lists of spare tuples, which tracemalloc counts.)
In the second half all losses are kept in a list: that may cost a Tensor, its used-up node and a number each.
"""

import gc
import tracemalloc

import numpy as np
from lifetime_probe import buffers, traced

import minizero as mz
from minizero import functional as F
from minizero import nn

WARM, DROPPED, KEPT = 20, 60, 100  # steps: memory is looked at after each of them
LOSS = 700  # bytes
SPARE = 10_000  # bytes: what CPython itself keeps for functions that have run often (3.10: 170 a step, for a while)
comm = mz.Communicator()
tokens = np.random.default_rng(comm.rank).integers(0, 17, (2, 5))
gc.disable()
for stage in (mz.DataParallel, mz.Zero3):
    model = nn.GPT(vocab=17, context=5, width=16, heads=2, layers=1, dropout=0.1)
    engine = stage(model, mz.Adam(), comm)
    where = f"rank {comm.rank}, {stage.__name__}"
    losses: list[mz.Tensor] = []
    found: dict[int, tuple[int, int, int]] = {}
    tracemalloc.start()
    for step in range(1, KEPT + 1):
        loss = F.cross_entropy(engine(tokens), tokens)
        engine.backward(loss)
        if step > DROPPED:
            losses.append(loss)
        engine.clip_grad_norm(1.0)
        engine.step()
        if step in (WARM, DROPPED, KEPT):
            garbage = gc.collect()
            assert not garbage or step == WARM, f"{where}, step {step}: {garbage} objects need the garbage collector"
            found[step] = len(buffers()), sum(buffers()), traced()
    tracemalloc.stop()
    warm, dropped, kept = (np.array(found[step]) for step in (WARM, DROPPED, KEPT))
    assert (dropped - warm <= (0, 0, SPARE)).all(), f"{where}: buffers, their bytes, all bytes: {warm}, then {dropped}"
    count = len(losses)
    limits = (count, 16 * count, SPARE + LOSS * count)
    assert (kept - dropped <= limits).all(), f"{where}: with losses kept {dropped}, then {kept}"
    assert count == KEPT - DROPPED and 0 < losses[-1].item() < 2.5, f"{where}: {count} losses kept, {losses[-1]}"
    if comm.rank == 0:
        print(f"{stage.__name__}: {dropped - warm} dropped, {kept - dropped} kept")
