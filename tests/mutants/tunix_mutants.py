"""Faults in what tunix is given of a micro-batch."""

from __future__ import annotations

from mutant import Mutant

FILE = "shmstage/adapters/tunix.py"
TESTS = "tests/ecosystem/test_tunix.py"

MUTANTS = (
    Mutant(
        "a field that tunix lacks is dropped without a word",
        FILE,
        "        if not unknown:\n            return\n",
        "        if not unknown or names:\n            return\n",
        (f"{TESTS}::test_a_field_that_the_class_lacks_is_refused_by_name[values]",),
    ),
    Mutant(
        "tunix gets a copy of every array",
        FILE,
        "        return {name: array for name, array in batch.items() if name not in omitted}\n",
        "        return {name: array + 0 for name, array in batch.items() if name not in omitted}\n",
        (f"{TESTS}::test_every_packed_field_is_handed_over_as_it_is_and_prompts_are_empty",),
    ),
    Mutant(
        "a field that tunix needs is None",
        FILE,
        "                if name not in NULLABLE:\n",
        "                if name in NULLABLE:\n",
        (f"{TESTS}::test_a_field_that_was_not_packed_is_no_none_where_none_is_no_value",),
    ),
    Mutant(
        "prompts are made anew for every micro-batch on the host",
        FILE,
        "            return ids[:, :0]\n",
        "            return jax.numpy.zeros((ids.shape[0], 0), np.int32)\n",
        (f"{TESTS}::test_host_arrays_stay_host_arrays",),
    ),
    Mutant(
        "routing that is to be left out leaves its offsets behind",
        FILE,
        "            omitted.update(NAMES[encoding_of(batch) or \"dense\"])\n",
        "            omitted.update(NAMES[encoding_of(batch) or \"dense\"][:1])\n",
        (f"{TESTS}::test_what_is_to_be_left_out_is_left_out[ragged]",),
    ),
    Mutant(
        "both empty prompts are one array, which cannot be donated",
        FILE,
        "        key = (name, ids.shape[0], ids.sharding)\n",
        "        key = (\"\", ids.shape[0], ids.sharding)\n",
        (f"{TESTS}::test_every_payload_may_be_donated",),
    ),
    Mutant(
        "prompts that were donated are given again",
        FILE,
        "        if key not in self._prompts or self._prompts[key].is_deleted():\n",
        "        if key not in self._prompts:\n",
        (f"{TESTS}::test_every_payload_may_be_donated",),
    ),
)
