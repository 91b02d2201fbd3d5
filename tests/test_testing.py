"""Failpoints without a test build: the table that processes share."""

from fastrt.testing import Failpoints


def test_closing_an_attached_table_leaves_its_file_to_the_creator(tmp_path):
    with Failpoints(tmp_path / "points") as made:
        with Failpoints.attach(made.path) as attached:
            attached.jitter(3)
        assert Failpoints.attach(made.path).points() == {}
    assert not made.path.exists()
