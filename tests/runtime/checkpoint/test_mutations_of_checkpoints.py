"""The tests of checkpoints and recovery find what breaks them: each safeguard is taken away, one
after the other, and the test that is for it has to see that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from graphflow.errors import GraphflowError
from graphflow.execution.variable_store import VariableStore
from graphflow.recovery import recoverer as recovery
from graphflow.recovery.checkpoint_writer import CheckpointWriter
from graphflow.recovery.recoverer import Recovery
from graphflow.recovery.replay_log import CommittedStep, ReplayLog
from graphflow.runtime.checkpoint import files, folder, manifest, remote, store
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.host import session_state
from tests.recovery import test_checkpoints as sessions
from tests.runtime.checkpoint import test_checkpoint as folders
from tests.runtime.checkpoint import test_power_loss as power

Mutation = Callable[[], Any]  # what makes it hold for a while
Test = Callable[[Path, pytest.MonkeyPatch], None]


def patch_with(kind: Any, name: str, make: Callable[[Any], Any]) -> Mutation:
    """Another function in the place of one, made of that."""
    return lambda: mock.patch.object(kind, name, make(getattr(kind, name)))


# Files ----------------------------------------------------------------------------------------


def skip_fsync(call: Any) -> Any:
    def mutant(*given: Any, **more: Any) -> Any:
        with mock.patch.object(os, "fsync", lambda file: None):
            return call(*given, **more)

    return mutant


def syncs_drafts(only: bool) -> Callable[[Any], Any]:
    """Syncs the names in a draft's folder only, or all others only."""
    return lambda sync: lambda place: sync(place) if (".partial-" in str(place)) is only else None


def renames_first(put_in_place: Any) -> Any:
    def mutant(partial: Path, target: Path) -> None:
        with mock.patch.object(files, "sync_folder", lambda place: None):
            put_in_place(partial, target)
        files.sync_folder(target)
        files.sync_folder(target.parent)

    return mutant


def begins_in_place(begin: Any) -> Any:
    def mutant(target: Path) -> Path:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    return mutant


def makes_room_by_removing(put_in_place: Any) -> Any:
    def mutant(partial: Path, target: Path) -> None:
        files.remove_folder(target)
        put_in_place(partial, target)

    return mutant


def overwrites(replace_file: Any) -> Any:
    def mutant(path: Path, data: bytes) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(file, data)
        os.fsync(file)
        os.close(file)
        files.sync_folder(path.parent)

    return mutant


def leaves_what_made_room(clean: Any) -> Any:
    def mutant(root: Path, ours: Any) -> Any:
        for old in root.glob(".*.old-*"):
            shutil.rmtree(old)
        return clean(root, ours)

    return mutant


def for_all_to_read(write_new: Any) -> Any:
    return lambda path, parts, within=None, mode=0o666: write_new(path, parts, within, 0o666)


# Manifests ------------------------------------------------------------------------------------


def reads_any_bytes(read: Any) -> Any:
    return lambda source, shard, step: (source / shard.file).read_bytes()


def reads_anywhere(read: Any) -> Any:
    def mutant(source: Path, shard: Any, step: int) -> Any:
        place = source / shard.file
        return read(place.parent, replace(shard, file=place.name), step)

    return mutant


def commits_in_part(commit: Any) -> Any:
    """Variables that no shard holds are left out."""

    def mutant(self: Any, variables: Any, pieces: Any = None) -> None:
        held = {name for shard in self.shards for name in shard.variables}
        commit(self, {name: kind for name, kind in variables.items() if name in held}, pieces)

    return mutant


# A directory ----------------------------------------------------------------------------------


def keeps_the_oldest(prune: Any) -> Any:
    def mutant(self: CheckpointStore) -> None:
        for each in self.folders()[: -self.keep]:
            files.remove_folder(each)

    return mutant


def keeps_one_less(prune: Any) -> Any:
    def mutant(self: CheckpointStore) -> None:
        self.keep -= 1
        prune(self)
        self.keep += 1

    return mutant


def counts_what_is_damaged(prune: Any) -> Any:
    def mutant(self: CheckpointStore) -> None:
        for each in self.folders()[self.keep :]:
            files.remove_folder(each)

    return mutant


def sorts_by_steps(found: Any) -> Any:
    return lambda root: sorted(found(root), key=lambda each: each.name, reverse=True)


def believes_the_newest(newest: Any) -> Any:
    def mutant(root: Path, skipped: Any, *fits: Any) -> Any:
        for each in store.folders(root)[:1]:
            return each, store.load(each)
        return None

    return mutant


def advances_by(steps: int) -> Callable[[Any], Any]:
    """The next epoch is noted only when the next checkpoint is written, or is none."""

    def make(advance: Any) -> Any:
        def mutant(self: CheckpointStore) -> int:
            self.check_owner()
            self.epoch += steps
            return self.epoch

        return mutant

    return make


def begins_at_the_same_epoch(init: Any) -> Any:
    def mutant(self: CheckpointStore, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        self.epoch = max(1, self.epoch - 1)
        self._write_session()

    return mutant


# Sessions -------------------------------------------------------------------------------------


def resumes_off_by_one(resume: Any) -> Any:
    def mutant(self: CheckpointWriter, *given: Any) -> Any:
        found = resume(self, *given)
        if found is not None:
            self._steps.committed += 1
        return found

    return mutant


def writes_the_step_before(begin: Any) -> Any:
    """A checkpoint is named by a step that it is not of."""

    def mutant(self: CheckpointWriter) -> Any:
        self._steps.committed -= 1
        try:
            return begin(self)
        finally:
            self._steps.committed += 1

    return mutant


def counts_as_written(land: Any) -> Any:
    def mutant(self: CheckpointWriter) -> Any:
        if self.pending is not None and self.pending.outcome is not None:
            self.pending.outcome = str(self.pending.outcome)
        return land(self)

    return mutant


def notes_another_step(note: Any) -> Any:
    def mutant(self: ReplayLog, entry: Any) -> None:
        if isinstance(entry, CommittedStep):
            entry = replace(entry, before=entry.before + 1)
        note(self, entry)

    return mutant


def notes_feeds_themselves(step: Any) -> Any:
    def mutant(self: Recovery, tensors: Any, feeds: Any, begun: Any) -> Any:
        values = step(self, tensors, feeds, begun)
        entries = self._replay_log._segments[-1].entries
        entries[-1] = replace(entries[-1], feeds=feeds)
        return values

    return mutant


def notes_steps_only(note: Any) -> Any:
    return lambda self, entry: note(self, entry) if isinstance(entry, CommittedStep) else None


def begins_with(shift: int) -> Callable[[Any], Any]:
    """Steps are done again from another place."""

    def make(base: Any) -> Any:
        def mutant(self: ReplayLog) -> Any:
            place, checkpoint = base(self)
            return max(0, place + shift), checkpoint

        return mutant

    return make


def keeps_the_state(restore: Any) -> Any:
    """What workers hold is taken for what the checkpoint says."""

    def mutant(self: VariableStore, checkpoint: Any, *, homes: bool) -> None:
        restore(self, replace(checkpoint, variables={}), homes=homes)

    return mutant


def drops_one_more(last_written: Any) -> Any:
    return lambda self, skip: last_written(self, 0)


@contextmanager
def never_uncertain() -> Iterator[None]:
    with mock.patch.object(Recovery, "_make_certain", lambda self: None):
        yield


@contextmanager
def without_end() -> Iterator[None]:
    with mock.patch.object(recovery, "MAX_RECOVERIES", 10**9):
        yield


def goes_on(close: Any) -> Any:
    """Nothing is written at the end."""
    return lambda self, *, complete: close(self, complete=False)


# Which test finds it ---------------------------------------------------------------------------


def pass_folder(test: Any, *given: Any) -> Test:
    """A test of files alone."""
    return lambda place, patch: test(*given, tmp_path=place)


def pass_monkeypatch(test: Any) -> Test:
    return lambda place, patch: test(tmp_path=place, monkeypatch=patch)


def lose_workers(test: Any, *given: Any, patches: bool = False) -> Test:
    """A test whose sessions lose their workers."""

    def run(place: Path, patch: pytest.MonkeyPatch) -> None:
        more = {"monkeypatch": patch} if patches else {}
        test(*given, losing=sessions.Losing(patch), tmp_path=place, **more)

    return run


POWER = pass_folder(
    power.test_a_directory_of_checkpoints_has_after_a_power_failure_what_was_written, 1
)
SAVED = pass_folder(
    power.test_a_checkpoint_that_is_saved_over_is_the_old_or_the_new_after_a_power_failure
)
KILLED = pass_folder(folders.test_a_directory_of_checkpoints_survives_a_kill_at_any_call)
DAMAGED = pass_folder(folders.test_every_flipped_bit_and_every_truncation_is_told)
KEPT = pass_folder(sessions.test_checkpoints_are_written_every_so_many_steps_and_the_last_few_stay)
NEWEST = pass_folder(
    folders.test_the_newest_checkpoint_that_is_whole_is_taken_and_the_others_are_told
)
NOTED = lose_workers(
    sessions.test_a_worker_that_is_lost_while_nothing_can_be_noted_is_replaced, "a full disk"
)
LOOP = pass_folder(sessions.test_a_loop_over_the_steps_that_are_left_gives_the_same_bits)
AGAIN = lose_workers(sessions.test_steps_that_are_done_again_draw_the_same_numbers)
SET = lose_workers(sessions.test_what_was_set_between_steps_is_set_again_in_its_place)
BASE = lose_workers(sessions.test_a_damaged_base_is_left_for_the_one_before)

MUTATIONS: dict[str, tuple[Mutation, Test]] = {
    "files are not synced": (patch_with(files, "write_new", skip_fsync), POWER),
    "a draft's names are not synced": (
        patch_with(files, "sync_folder", syncs_drafts(False)),
        POWER,
    ),
    "a rename is not synced": (patch_with(files, "sync_folder", syncs_drafts(True)), POWER),
    "a rename comes before what it renames": (
        patch_with(files, "put_in_place", renames_first),
        POWER,
    ),
    "a new directory is not synced": (patch_with(files, "make_folder", skip_fsync), POWER),
    "notes are written over": (patch_with(files, "replace_file", overwrites), POWER),
    "what made room is removed": (patch_with(files, "clean_up", leaves_what_made_room), POWER),
    "an epoch is noted late": (patch_with(CheckpointStore, "advance", advances_by(1)), POWER),
    "the old goes before the new comes": (
        patch_with(files, "put_in_place", makes_room_by_removing),
        SAVED,
    ),
    "checkpoints are written in their place": (
        patch_with(files, "begin_folder", begins_in_place),
        KILLED,
    ),
    "checkpoints are removed in their place": (
        patch_with(files, "remove_folder", lambda remove: lambda place: shutil.rmtree(place, True)),
        KILLED,
    ),
    "secrets are for all to read": (
        patch_with(files, "write_new", for_all_to_read),
        pass_folder(folders.test_the_note_of_a_session_is_for_its_owner_alone),
    ),
    "links are followed": (
        lambda: mock.patch.object(os, "O_NOFOLLOW", 0),
        pass_folder(folders.test_a_worker_follows_no_link_and_overwrites_nothing),
    ),
    "any name is a shard's": (
        lambda: mock.patch.object(remote, "check_names", lambda *names: None),
        pass_folder(folders.test_a_name_from_the_wire_that_is_none_of_ours_is_refused, "../c"),
    ),
    "no look at a shard's digest": (patch_with(folder, "_read_shard", reads_any_bytes), DAMAGED),
    "no look at a manifest's digest": (
        lambda: mock.patch.object(manifest, "_digest", lambda told: ""),
        DAMAGED,
    ),
    "shards lie anywhere": (
        patch_with(folder, "_read_shard", reads_anywhere),
        pass_folder(
            folders.test_a_manifest_that_lies_is_refused_though_its_digest_is_right,
            "a shard of another folder",
        ),
    ),
    "any format is read": (
        lambda: mock.patch.object(manifest, "FORMAT", 10**9),
        pass_folder(
            folders.test_a_damaged_checkpoint_is_refused_and_changes_nothing, "a newer format"
        ),
    ),
    "a checkpoint in part": (
        patch_with(folder.CheckpointDraft, "commit", commits_in_part),
        pass_folder(
            folders.test_a_checkpoint_whose_variables_are_in_no_shard_is_not_put_in_its_place
        ),
    ),
    "the oldest are kept": (patch_with(CheckpointStore, "prune", keeps_the_oldest), KEPT),
    "one less is kept": (patch_with(CheckpointStore, "prune", keeps_one_less), KEPT),
    "what is damaged counts as kept": (
        patch_with(CheckpointStore, "prune", counts_what_is_damaged),
        pass_folder(folders.test_what_cannot_be_read_does_not_count_among_those_that_are_kept),
    ),
    "the highest step is the newest": (
        patch_with(store, "folders", sorts_by_steps),
        pass_folder(sessions.test_going_back_by_hand_makes_what_follows_the_newest),
    ),
    "the newest is believed": (patch_with(store, "newest", believes_the_newest), NEWEST),
    "who was there before goes on": (
        patch_with(CheckpointStore, "check_owner", lambda check: lambda self: None),
        pass_folder(sessions.test_who_takes_a_directory_over_fences_who_had_it),
    ),
    "a start takes no epoch": (
        patch_with(CheckpointStore, "__init__", begins_at_the_same_epoch),
        pass_folder(
            folders.test_a_directory_keeps_the_last_few_and_a_new_start_takes_the_next_epoch
        ),
    ),
    "a recovery takes no epoch": (patch_with(CheckpointStore, "advance", advances_by(0)), NOTED),
    "a session goes on a step later": (
        patch_with(CheckpointWriter, "resume", resumes_off_by_one),
        LOOP,
    ),
    "a checkpoint of the step before": (
        patch_with(CheckpointWriter, "begin", writes_the_step_before),
        LOOP,
    ),
    "the state moves while it is written": (
        patch_with(
            session_state.SessionState,
            "snapshot",
            lambda snapshot: (
                lambda self: {
                    name: value
                    for held in self._variables._by_device.values()
                    for name, value in held.items()
                }
            ),
        ),
        pass_monkeypatch(
            sessions.test_what_is_written_beside_steps_that_go_on_is_the_state_of_its_step
        ),
    ),
    "what failed counts as written": (
        patch_with(CheckpointWriter, "collect_finished", counts_as_written),
        lose_workers(
            sessions.test_after_ctrl_c_training_goes_on_though_the_disk_is_full, patches=True
        ),
    ),
    "steps draw other numbers again": (patch_with(ReplayLog, "add", notes_another_step), AGAIN),
    "feeds are not copied": (
        patch_with(Recovery, "step", notes_feeds_themselves),
        lose_workers(sessions.test_feeds_are_kept_as_they_were),
    ),
    "what was set is not kept": (patch_with(ReplayLog, "add", notes_steps_only), SET),
    "steps are left out": (patch_with(ReplayLog, "find_base", begins_with(+1)), AGAIN),
    "steps are done twice": (patch_with(ReplayLog, "find_base", begins_with(-1)), AGAIN),
    "the state is not restored": (patch_with(VariableStore, "restore", keeps_the_state), AGAIN),
    "one checkpoint leads on, and no other": (
        patch_with(ReplayLog, "_last_written", drops_one_more),
        BASE,
    ),
    "after Ctrl-C all seems certain": (
        never_uncertain,
        lose_workers(
            sessions.test_ctrl_c_after_the_deed_and_before_its_note_leaves_a_way_back,
            "run",
            patches=True,
        ),
    ),
    "what was loaded is where it was": (
        never_uncertain,
        lose_workers(sessions.test_a_checkpoint_that_was_loaded_may_be_saved_over),
    ),
    "losses are not counted": (
        without_end,
        lose_workers(sessions.test_losses_without_end_are_given_up),
    ),
    "a session leaves no last checkpoint": (patch_with(Recovery, "close", goes_on), KEPT),
}


LATE = (
    "losses are not counted",
    "notes are written over",
    "what made room is removed",
    "an epoch is noted late",
    "checkpoints are removed in their place",
)
"""What takes seconds to be found."""


@pytest.mark.parametrize(
    "broken",
    [pytest.param(name, marks=pytest.mark.slow) if name in LATE else name for name in MUTATIONS],
)
def test_a_checkpoint_without_one_of_its_safeguards_is_found_out(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation, test = MUTATIONS[broken]
    with mutation(), pytest.raises((AssertionError, pytest.fail.Exception, GraphflowError)):
        test(tmp_path, monkeypatch)
