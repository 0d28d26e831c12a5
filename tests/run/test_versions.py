from surogate_core.run.versions import untested_torch


def test_a_torch_beyond_the_tested_ones_is_said():
    for known in ("2.11.0", "2.13.0+cpu", "2.13.2+cu130", "1.9.1"):
        assert untested_torch(known) == []
    for new in ("2.14.0+cpu", "2.15.0a0+git12", "3.0.0"):
        assert untested_torch(new) == [
            f"torch {new} is newer than 2.13, the newest that this version of Surogate was tested with."
        ]
    assert untested_torch() == []
