"""The membership's decisions alone: facts in, orders out, and no time but the test's."""

from collections.abc import Iterable
from typing import Any

import pytest

from fastrt.membership import events as ev
from fastrt.membership.events import Metadata, Phase, Refused, Role
from support.cluster_play import SERVER, WORKER, Play


def formed(workers: int = 1, servers: int = 1, **changes: Any) -> Play:
    """A cluster that is READY: workers w0.., servers s0.., each with the rank of its name."""
    play = Play(workers, servers, **changes)
    play.register(*(f"w{i}" for i in range(workers)), *(f"s{i}" for i in range(servers)))
    assert play.phase is Phase.READY
    return play


def names(views: Iterable[Any]) -> list[str]:
    return [view.member_id for view in views]


def test_all_are_told_of_all_when_the_last_has_come() -> None:
    play = Play(2, 1)
    play.register("w0", "s0")
    assert not play.told
    assert play.phase is Phase.STARTING
    play.register("w1")
    assert play.phase is Phase.READY
    assert [play.rank(name) for name in ("w0", "w1", "s0")] == [0, 1, 0]
    (told,) = play.orders("w0", Metadata)
    assert names(told.overview.members) == ["s0", "w0", "w1"]


def test_one_too_many_is_refused_in_words() -> None:
    play = formed(1, 1)
    answer = play.register("w9")
    assert isinstance(answer, Refused)
    assert "1 workers" in str(answer)
    assert play.phase is Phase.READY


def test_same_id_gets_its_rank_back_and_the_cluster_is_ready_again() -> None:
    play = formed(3, 1)
    play.lose("w1")
    assert play.phase is Phase.NODE_TIMEOUT
    assert play.beat("w0").is_impaired
    play.register("w1")
    assert play.phase is Phase.READY
    assert play.rank("w1") == 1
    assert len(play.orders("w0", Metadata)) == 2


def test_new_id_takes_a_lost_ones_rank_and_the_old_id_is_then_one_too_many() -> None:
    play = formed(3, 1)
    play.lose("w2", "w1")
    play.register("wx", "wy")
    assert (play.rank("wx"), play.rank("wy"), play.phase) == (1, 2, Phase.READY)
    assert isinstance(play.register("w1"), Refused)


def test_id_that_is_alive_is_refused_elsewhere_and_by_another_role() -> None:
    play = formed(1, 1)
    answer = play.register("w0")
    assert isinstance(answer, Refused)
    assert "127.0.0.1:7001" in str(answer)
    assert play.do(ev.Register, play.link_of["w0"], "w0", SERVER, "127.0.0.1", 1).args
    assert play.register("w0", link=play.link_of["w0"]) is None  # the same connection may say it again


@pytest.mark.parametrize(
    ("member_id", "role", "host", "port", "words"),
    [
        ("", WORKER, "127.0.0.1", 1, "characters"),
        ("w" * 300, WORKER, "127.0.0.1", 1, "characters"),
        ("w", Role.SCHEDULER, "127.0.0.1", 1, "scheduler"),
        ("w", WORKER, "somewhere", 1, "not an IP address"),
        ("w", WORKER, "127.0.0.1", 70_000, "not a port"),
    ],
)
def test_registration_that_makes_no_sense_is_refused(
    member_id: str, role: Role, host: str, port: int, words: str
) -> None:
    play = Play(1, 1)
    answer = play.do(ev.Register, 1, member_id, role, host, port)
    assert isinstance(answer, Refused)
    assert words in str(answer)
    assert not play.state.members.by_id


def test_silence_is_the_second_line_and_a_heartbeat_from_a_new_connection_brings_back() -> None:
    play = formed(1, 1, heartbeat_timeout_s=10.0)
    play.now += 9
    play.beat("w0")
    play.later(2)
    assert play.phase is Phase.NODE_TIMEOUT
    assert [member.member_id for member in play.state.members.lost()] == ["s0"]
    assert play.do(ev.Heartbeat, 77, "s0").phase is Phase.READY
    assert play.ranks[77] == 0


def test_member_that_comes_back_before_all_are_there_is_not_sent_metadata() -> None:
    play = Play(1, 1)
    play.register("w0")
    play.lose("w0")
    play.do(ev.Heartbeat, 77, "w0")
    assert 77 not in play.told
    play.register("s0")
    assert play.ranks[77] == 0


def test_heartbeat_at_the_end_of_a_member_that_was_away_is_answered_with_the_end() -> None:
    play = formed(1, 1)
    play.do(ev.Finish, play.link_of["w0"], "w0")
    play.lose("w0")
    play.do(ev.Finish, play.link_of["s0"], "s0")
    assert play.do(ev.Heartbeat, 77, "w0").phase is Phase.EXIT
    assert isinstance(play.told[77][0], ev.Ended)


def test_heartbeat_of_a_stranger_is_refused() -> None:
    assert isinstance(Play(1, 1).do(ev.Heartbeat, 5, "who"), Refused)


def test_members_that_never_come_are_a_timeout_until_they_do() -> None:
    play = Play(2, 0, available_timeout_s=50.0)
    play.register("w0")
    for _ in range(6):
        play.later(10)
        play.beat("w0")
    assert play.phase is Phase.NODE_TIMEOUT
    play.register("w1")
    assert play.phase is Phase.READY


def test_all_finish_and_are_told_and_a_recovered_member_must_finish_anew() -> None:
    play = formed(1, 1)
    play.do(ev.Finish, play.link_of["w0"], "w0")
    play.lose("w0")  # its work is done: nobody misses it
    assert play.phase is Phase.READY
    play.register("w0")
    play.do(ev.Finish, play.link_of["s0"], "s0")
    assert play.phase is Phase.READY
    play.do(ev.Finish, play.link_of["w0"], "w0")
    assert play.phase is Phase.EXIT
    assert play.orders("w0", ev.Ended)
    assert play.orders("s0", ev.Ended)
    assert isinstance(play.register("w5"), Refused)


def test_request_about_a_member_over_another_connection_is_refused_and_changes_nothing() -> None:
    play = formed(1, 1)
    before = play.state.overview()
    for link in (play.link_of["s0"], 99):
        for kind, more in ((ev.Finish, ()), (ev.Publish, (7,)), (ev.ScaleDone, (Phase.SCALE_OUT,)), (ev.Heartbeat, ())):
            assert isinstance(play.do(kind, link, "w0", *more), Refused)
    play.lose("w0")
    assert isinstance(play.do(ev.Finish, play.link_of["s0"], "w0"), Refused)
    play.register("w0")
    assert play.state.overview()._replace(members=()) == before._replace(members=())
    assert not play.state.members.finished_count


def test_member_that_was_away_at_the_end_is_told_of_it_when_it_comes_back() -> None:
    play = formed(1, 1)
    play.do(ev.Finish, play.link_of["w0"], "w0")
    play.lose("w0")
    play.do(ev.Finish, play.link_of["s0"], "s0")
    assert play.phase is Phase.EXIT
    assert not isinstance(play.register("w0"), Refused)
    assert play.orders("w0", ev.Ended)


def test_finished_member_that_reports_it_again_after_the_end_is_told_of_the_end() -> None:
    play = formed(1, 1)
    play.do(ev.Finish, play.link_of["w0"], "w0")
    play.lose("w0")
    play.do(ev.Finish, play.link_of["s0"], "s0")
    play.register("w0")
    assert not isinstance(play.do(ev.Finish, play.link_of["w0"], "w0"), Refused)
    assert play.orders("w0", ev.Ended)


def test_lost_member_is_waited_for_before_the_cluster_ends_without_it() -> None:
    play = formed(1, 1, available_timeout_s=50.0, heartbeat_timeout_s=10.0)
    play.do(ev.Finish, play.link_of["w0"], "w0")
    play.lose("s0")
    play.later(20)
    assert play.phase is Phase.NODE_TIMEOUT
    play.later(31)
    assert play.phase is Phase.EXIT


def test_cluster_that_is_cut_off_whole_does_not_end() -> None:
    play = formed(1, 1, available_timeout_s=50.0, heartbeat_timeout_s=10.0)
    play.later(10_000)
    assert play.phase is Phase.NODE_TIMEOUT
    play.register("w0", "s0")
    assert play.phase is Phase.READY


def scaled_out(play: Play) -> None:
    old = list(play.state.members.by_id)
    assert play.do(ev.ScaleOut, 1, 2) is None
    assert play.orders("w0", ev.PrepareScale)[-1].servers == play.state.members.counts[SERVER]
    play.again(*old)
    fresh = [f"w{len(play.link_of)}", f"s{len(play.link_of)}", f"s{len(play.link_of) + 1}"]
    play.register(*fresh)
    assert play.orders("w0", Metadata)[-1].overview.phase is Phase.SCALE_OUT
    play.done(Phase.SCALE_OUT, *old)
    assert play.phase is Phase.SCALE_OUT
    ended = len(play.orders("w0", ev.ScaleEnded))
    play.done(Phase.SCALE_OUT, *fresh)
    assert len(play.orders("w0", ev.ScaleEnded)) == ended + 1
    assert play.phase is Phase.READY


def test_scale_out_twice_waits_for_everybody_each_time() -> None:
    play = formed(1, 1)
    scaled_out(play)
    scaled_out(play)
    assert play.state.members.counts == {SERVER: 5, WORKER: 3}
    assert len(play.orders("w0", ev.ScaleEnded)) == 2


def test_done_of_an_earlier_round_does_not_count() -> None:
    play = formed(1, 1)
    scaled_out(play)
    play.do(ev.ScaleOut, 1, 0)
    play.done(Phase.SCALE_OUT, *play.link_of)  # late ones
    play.again(*play.link_of)
    play.register("wz")
    assert play.phase is Phase.SCALE_OUT
    assert len(play.state.round.undone) == 6  # type: ignore[union-attr]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_scale_out_that_does_not_end_in_time_or_shall_not_is_taken_back(applied: bool, asked: bool) -> None:
    play = formed(1, 1, scale_timeout_s=20.0, heartbeat_timeout_s=1000.0)
    play.do(ev.ScaleOut, 0, 2)
    play.again("w0", "s0")
    play.register("s1")
    if applied:
        play.register("s2")
        play.done(Phase.SCALE_OUT, "w0", "s0")
        assert play.rank("s2") == 2
    if asked:
        assert play.do(ev.TakeBack) is None
    else:
        play.later(21)
    assert play.phase is Phase.READY
    assert play.state.members.counts == {SERVER: 1, WORKER: 1}
    assert play.rank("s1") is None
    back = play.orders("w0", Metadata)[-1].overview
    assert (back.phase, back.servers, names(back.members)) == (Phase.READY, 1, ["s0", "w0"])
    assert isinstance(play.register("s3"), Refused)
    assert isinstance(play.do(ev.TakeBack), Refused)
    scaled_out(play)


def test_newcomer_that_dies_before_all_are_there_leaves_its_place_to_another() -> None:
    play = formed(1, 1)
    play.do(ev.ScaleOut, 0, 1)
    play.register("sx")
    play.lose("sx")
    play.register("sy")
    play.again("w0", "s0")
    assert play.rank("sy") == 1


def test_scale_in_moves_only_the_highest_into_the_gaps() -> None:
    play = formed(3, 5)
    assert play.do(ev.ScaleIn, ["s1", "s2", "w1"]) is None
    assert [order.leaving for order in play.orders("s1", ev.PrepareScale)] == [True]
    assert [order.leaving for order in play.orders("s0", ev.PrepareScale)] == [False]
    stayers = ["w0", "w2", "s0", "s3", "s4"]
    play.again(*stayers)
    assert [play.rank(name) for name in stayers] == [0, 1, 0, 1, 2]
    assert [play.rank(name) for name in ("s1", "s2", "w1")] == [None] * 3
    play.done(Phase.SCALE_IN, *stayers)
    assert play.phase is Phase.READY
    assert play.do(ev.Finish, play.link_of["s1"], "s1") is None  # a leaver's, which ends nothing
    assert play.orders("s1", ev.Ended)
    assert play.phase is Phase.READY


@pytest.mark.parametrize(
    ("members", "words"), [(["who"], "illegal"), (["s0"], "illegal"), (["w0"], "illegal"), ([], "empty")]
)
def test_scale_in_that_cannot_be_is_refused(members: list[str], words: str) -> None:
    play = formed(2, 2)
    answer = play.do(ev.ScaleIn, members)
    assert isinstance(answer, Refused)
    assert words in str(answer)
    assert play.phase is Phase.READY


@pytest.mark.parametrize("amounts", [(0, 0), (-1, 2), (1, -1), (0, 1 << 30)])
def test_scale_out_by_nonsense_is_refused(amounts: tuple[int, int]) -> None:
    play = formed(1, 1)
    assert isinstance(play.do(ev.ScaleOut, *amounts), Refused)
    assert play.phase is Phase.READY


def test_scaling_needs_a_ready_cluster() -> None:
    play = Play(1, 1)
    assert "The cluster is not ready." in str(play.do(ev.ScaleOut, 0, 1))
    play = formed(1, 1)
    play.do(ev.ScaleOut, 0, 1)
    assert "SCALE_OUT" in str(play.do(ev.ScaleOut, 0, 1))


def test_scale_in_that_has_been_applied_goes_forward_at_its_end() -> None:
    play = formed(1, 2, scale_timeout_s=20.0, heartbeat_timeout_s=1000.0)
    play.do(ev.ScaleIn, ["s1"])
    play.again("w0", "s0")
    play.done(Phase.SCALE_IN, "w0")
    play.later(21)
    assert play.phase is Phase.READY
    assert play.orders("w0", ev.ScaleEnded)


def test_member_lost_while_all_go_on_is_told_again_and_waited_for() -> None:
    play = formed(2, 1)
    play.do(ev.ScaleOut, 0, 1)
    play.again("w0", "w1", "s0")
    play.register("s1")
    play.done(Phase.SCALE_OUT, "w0", "w1", "s0")
    play.lose("w1")
    play.done(Phase.SCALE_OUT, "s1")
    assert play.phase is Phase.SCALE_OUT
    play.register("w1")
    assert play.rank("w1") == 1
    play.done(Phase.SCALE_OUT, "w1")
    assert play.phase is Phase.READY


def test_events_go_to_all_the_sender_too_and_a_strangers_to_nobody() -> None:
    play = formed(1, 1)
    play.do(ev.Publish, play.link_of["w0"], "w0", 7)
    assert [play.orders(name, ev.Published) for name in ("w0", "s0")] == [[ev.Published(7)]] * 2
    assert isinstance(play.do(ev.Publish, 99, "who", 7), Refused)


def test_instruction_is_answered_when_the_servers_have_and_another_must_wait() -> None:
    play = formed(1, 2)
    call = play.calls + 1
    assert play.do(ev.Instruct, ev.Instruction.NEW_INSTANCE, b"{}") is None
    assert call not in play.answers
    assert play.phase is Phase.NEW_INSTANCE
    assert isinstance(play.do(ev.Instruct, ev.Instruction.ENABLE_FLS, b""), Refused)
    assert play.feed(ev.Instructed(call, {0: "ok", 1: "ok"})) == {0: "ok", 1: "ok"}
    assert play.phase is Phase.READY


def test_answer_to_an_earlier_query_does_not_end_a_later_instruction() -> None:
    play = formed(1, 1)
    for instruction in (ev.Instruction.QUERY_INSTANCE, ev.Instruction.NEW_INSTANCE):
        play.do(ev.Instruct, instruction, b"")
    assert play.feed(ev.Instructed(play.calls - 1, {0: "queried"})) == {0: "queried"}
    assert play.phase is Phase.NEW_INSTANCE
    play.feed(ev.Instructed(play.calls, {0: "ok"}))
    assert play.phase is Phase.READY


def test_late_answer_to_an_interrupted_instruction_does_not_end_the_next_one() -> None:
    play = formed(1, 1)
    play.do(ev.Instruct, ev.Instruction.NEW_INSTANCE, b"")
    interrupted = play.calls
    play.lose("s0")
    play.register("s0")
    play.do(ev.Instruct, ev.Instruction.NEW_INSTANCE, b"")
    play.feed(ev.Instructed(interrupted, {}))
    assert play.phase is Phase.NEW_INSTANCE


def test_restarted_machine_knows_ranks_and_what_was_lost() -> None:
    play = formed(2, 2)
    play.lose("s1")
    after = play.restarted()
    assert after.phase is Phase.NODE_TIMEOUT
    after.register("s1", "w1", "w0", "s0")
    assert after.phase is Phase.READY
    assert [after.rank(name) for name in ("w0", "w1", "s0", "s1")] == [0, 1, 0, 1]


def test_restarted_machine_waits_a_heartbeat_for_those_that_lived() -> None:
    after = formed(1, 1, heartbeat_timeout_s=10.0).restarted()
    assert after.phase is Phase.READY
    after.later(9)
    assert after.register("w0") is None
    assert after.rank("w0") == 0  # told at once: it may have missed something
    after.later(2)
    assert after.phase is Phase.NODE_TIMEOUT


@pytest.mark.parametrize("applied", [False, True])
def test_restart_in_a_scale_out_takes_it_back(applied: bool) -> None:
    play = formed(1, 1)
    play.do(ev.ScaleOut, 0, 1)
    play.again("w0")
    play.register("s1")
    if applied:
        play.again("s0")
    after = play.restarted()
    assert after.state.members.counts == {SERVER: 1, WORKER: 1}
    assert isinstance(after.register("s1"), Refused)
    after.register("w0", "s0")
    assert (after.phase, after.rank("w0")) == (Phase.READY, 0)


def test_restart_after_a_scale_in_was_applied_keeps_it() -> None:
    play = formed(1, 3)
    play.do(ev.ScaleIn, ["s1"])
    play.again("w0", "s0", "s2")
    after = play.restarted()
    after.register("w0", "s0", "s2")
    assert [after.rank(name) for name in ("w0", "s0", "s2")] == [0, 0, 1]
    assert after.phase is Phase.READY
    assert isinstance(after.register("s1"), Refused)
