"""The cases of tests/test_cases_numbers.py: how to run one by hand stands in cases_harness.py."""

import cases_adam
import cases_bad_numbers
from cases_harness import run

run({**vars(cases_adam), **vars(cases_bad_numbers)})
