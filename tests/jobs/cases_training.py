"""The cases of tests/test_cases_training.py: how to run one by hand stands in cases_harness.py."""

import cases_bits
import cases_lifetime
import cases_shapes
import cases_who
from cases_harness import run

run({**vars(cases_bits), **vars(cases_lifetime), **vars(cases_shapes), **vars(cases_who)})
