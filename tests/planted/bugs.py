"""
The planted bugs: what to break in a copy of the package, and the tests that must notice.

No two are of one kind. Each replaces whole statements, so that right and wrong ones can stand side
by side in one copy, and each run chooses.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["BUGS", "OVERRUN", "RACES", "Bug"]


class Bug(NamedTuple):
    """
    A bug to plant.

    Attributes:
        kind: what goes wrong.
        file: where in `shmcast/`.
        right: the statements that are there.
        wrong: those that stand there instead.
        tests: which of `tests/` notice, as pytest names them; none for what a sanitizer reports.
        is_slow: whether they take minutes.
    """

    kind: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ()
    is_slow: bool = False


BUGS: Final = (
    # --- the order of things ---
    Bug(
        "published before the copy",
        "_ring.pyx",
        """
            fill_image(<char *>header, self.published, stream, buffers, places)
""",
        """
            self._publish()
            self.published -= 1
            fill_image(<char *>header, self.published, stream, buffers, places)
""",
        ("test_death.py::test_writer_dies_in_the_middle_of_a_copy",),
    ),
    Bug(
        "cursor stored before the copy-out",
        "_ring.pyx",
        """
        self.taken_bytes = self.taken_oob_buffers = self.taken_oob_bytes = 0
""",
        """
        self.taken_bytes = self.taken_oob_buffers = self.taken_oob_bytes = 0
        store_release(self.cursor_word, self.cursor + 1)
""",
        ("test_ring.py::test_strike_ends_an_attachment",),
    ),
    Bug(
        "file sent after its message was published",
        "writer.py",
        """
        if not self.control.send_file(self._nonce, self._file, message.sent):
            return False
        # Let go of first: a call that is cut off must not close it twice.
        file, self._file = self._file, None
        if self.remote is not None:
            self._images[ring.messages] = map_file(file, message.image_bytes, writable=False)
        self.control.keep_file(self._nonce, file)
        ring.publish_file(self._nonce, stream, buffers)
""",
        """
        ring.publish_file(self._nonce, stream, buffers)
        if not self.control.send_file(self._nonce, self._file, message.sent):
            return False
        file, self._file = self._file, None
        if self.remote is not None:
            self._images[ring.messages] = map_file(file, message.image_bytes, writable=False)
        self.control.keep_file(self._nonce, file)
""",
        ("test_queue.py::test_timeout_between_the_files_of_two_readers",),
    ),
    Bug(
        "reason of a failure said after the end",
        "ends.py",
        """
        if error is not None and (transport := self._transport) is not None:
            # First: a peer that sees the closing mark has to see this too.
            transport.say_failed(failure_text(error))
        self._lock.close(self._finish)
""",
        """
        transport = self._transport
        self._lock.close(self._finish)
        if error is not None and transport is not None:
            transport.say_failed(failure_text(error))
""",
        ("test_failure.py::test_the_reason_comes_before_the_mark",),
    ),
    Bug(
        "no fence at the sleep mark",
        "_ring.pyx",
        """
        fence_full()
        seen = word_load_acquire(self.readers_word)
""",
        """
        seen = word_load_acquire(self.readers_word)
""",
        ("test_wakeups.py::test_no_wake_up_of_millions_is_lost",),
        is_slow=True,  # of 100,000 hand-overs it loses 3
    ),
    # --- the ring ---
    Bug(
        "one message more than the ring has chunks",
        "_ring.pyx",
        """
        self._refresh()
        return self.published - self.cached_least + n_free <= self.n_chunks
""",
        """
        self._refresh()
        return self.published - self.cached_least + n_free <= self.n_chunks + 1
""",
        ("test_ring.py::test_claim_of_a_full_ring",),
    ),
    Bug(
        "writer not woken",
        "_ring.pyx",
        """
        if load_relaxed(self.writer_sleeps):
            self._wake_writer()
""",
        """
        pass
""",
        ("test_ring.py::test_writer_wakes_for_space",),
    ),
    Bug(
        "epoch not compared",
        "_ring.pyx",
        """
        if self._is_struck():
            self._end_taken()
            return False
        self.cursor += 1
""",
        """
        self.cursor += 1
""",
        ("test_ring.py::test_strike_ends_an_attachment",),
    ),
    Bug(
        "cursor out of range believed",
        "_ring.pyx",
        """
                if cursor > self.published:
                    self.damaged_rank = rank
                elif cursor > self.cached_cursors[rank]:
                    # A smaller one is the last store of an attachment that was struck; the rank's
                    # present one will store again.
                    self.cached_cursors[rank] = cursor
""",
        """
                if cursor > self.cached_cursors[rank]:
                    self.cached_cursors[rank] = cursor
""",
        ("test_ring.py::test_cursor_out_of_range",),
    ),
    Bug(
        "count of buffers not checked against the image",
        "_ring.pyx",
        """
    if header.n_buffers > (limit_bytes - sizeof(ImageHeader)) // sizeof(BufferEntry):
        raise damaged(f"{header.n_buffers} buffers in {limit_bytes} bytes")
""",
        """
    pass
""",
        ("test_ring.py::test_read_image_of_too_many_buffers",),
    ),
    Bug(
        "memory not reserved",
        "_ring.pyx",
        """
        if needed_bytes > self.reserved_bytes[self.published % self.n_chunks]:
            return RESERVE
""",
        """
        pass
""",
        ("test_ring.py::test_claim_reserves_first",),
    ),
    Bug(
        "no fork guard",
        "_ring.pyx",
        """
        if self.fork_count_at_start != fork_count:
            raise forked("end of a queue", self.pid)
""",
        """
        pass
""",
        ("test_ring.py::test_forked_child",),
    ),
    # --- blocks and leases ---
    Bug(
        "private pages not dropped",
        "_ring.pyx",
        """
            is_dropped = drop_private_pages(lease.address, lease.n_bytes)
""",
        """
            is_dropped = True
""",
        ("test_ring.py::test_what_is_written_to_a_lease",),
    ),
    Bug(
        "block given up before its message is released",
        "_ring.pyx",
        """
        if not is_dropped:
            self.is_broken = True  # and the block is never given up: its next use would be torn
        elif lease.use <= self.released:
            # A message that was not released may be taken again: its blocks stay.
            give_up(self.given_up, self.given_ups, lease.slot, lease.use)
""",
        """
        if not is_dropped:
            self.is_broken = True
        else:
            give_up(self.given_up, self.given_ups, lease.slot, lease.use)
""",
        ("test_leases.py::test_no_memory_in_a_take",),
    ),
    Bug(
        "lease ends with the buffer",
        "pickler.py",
        """
    memory = bytearray(view) if view.readonly else view
""",
        """
    from shmcast._ring import address_of

    memory = Memory(address_of(view), view.nbytes, None)
""",
        ("test_leases.py::test_the_last_alias_releases",),
    ),
    Bug(
        "block used again before every reader gave it up",
        "arena.py",
        """
        if not (block.holders or block.disowned) and block.offset not in self.pending:
            self._give_back(block)
""",
        """
        if len(block.holders) < 2 and block.offset not in self.pending:
            self._give_back(block)
""",
        ("test_arena.py::test_free_after_the_last_holder",),
    ),
    Bug(
        "tensor of `empty` shared after it was published",
        "_ring.pyx",
        """
            failure = (<Draft?>draft).detach(data_descriptor) or failure
""",
        """
            pass
""",
        ("test_ring.py::test_draft_is_shared_until_it_is_published",),
    ),
    # --- death ---
    Bug(
        "dead reader not evicted",
        "roster.py",
        """
                is_dead = door.is_dead(member)
""",
        """
                is_dead = False
""",
        ("test_death.py::test_zombie",),
    ),
    Bug(
        "no second look at the counter after the writer's death",
        "attachment.py",
        """
        if ring.lag or ring.is_closing:
            return True
""",
        """
        pass
""",
        ("test_death.py::test_last_message_of_a_dying_writer[10-files]",),
    ),
    Bug(
        "locks dropped by closing a duplicate",
        "locks.py",
        """
            if self._users:
                return
""",
        """
            if self._users:
                os.close(self._descriptors.pop())
                return
""",
        ("test_control.py::test_a_user_less_drops_no_lock",),
    ),
    # --- pickling ---
    Bug(
        "memo not cleared",
        "pickler.py",
        """
            clear_memo()
""",
        """
            pass
""",
        ("test_pickler.py::test_the_pickler_is_kept_for_small_messages",),
    ),
    Bug(
        "pickler kept while it is in use",
        "pickler.py",
        """
        self._kept = None
        dump, clear_memo, parts, sink = kept
""",
        """
        self._kept = kept
        dump, clear_memo, parts, sink = kept
""",
        ("test_pickler.py::test_the_memory_of_a_message_is_forgotten",),
    ),
    Bug(
        "chunk kept by a message that can't be loaded",
        "queue.py",
        """
        try:
            if type(taken) is bytes:
                return self._loads(taken)
            stream, buffers = self._source.parts_of_file(taken) if type(taken) is int else taken
            return self._loads(stream, buffers=buffers)
        except Exception as error:
            self._add_notes(error)
            raise
        finally:
            self._release()
""",
        """
        if type(taken) is int:
            taken = self._source.parts_of_file(taken)
        stream, buffers = (taken, ()) if type(taken) is bytes else taken
        loaded = self._loads(stream, buffers=buffers)
        self._release()
        return loaded
""",
        ("test_queue.py::test_failing_messages_cost_nothing",),
    ),
    # --- the end ---
    Bug(
        "tail not read after the writer has closed",
        "attachment.py",
        """
        if self.is_over:
            self.check_not_failed()
            raise QueueClosed("the writer has closed, and everything was read")
""",
        """
        if self.ring.is_closing:
            raise QueueClosed("the writer has closed, and everything was read")
""",
        ("test_queue.py::test_close_between_two_looks",),
    ),
    # --- strangers ---
    Bug(
        "token not compared",
        "control.py",
        """
        if not hmac.compare_digest(frame.body, self.token.encode()):
            self._refuse(connection, _Kind.DENIAL, "the token is not the one of this queue")
        elif frame.rank not in self.ranks:
            self._refuse(
                connection, _Kind.REFUSAL, f"rank {frame.rank} is not one of {list(self.ranks)}"
            )
        else:
            self._decide(connection, frame.rank)
""",
        """
        self._decide(connection, frame.rank)
""",
        ("test_control.py::test_wrong_token",),
    ),
    Bug(
        "data file not sealed against writing",
        "segment.py",
        """
            add_seals(data_descriptor, FIXED_SIZE | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
""",
        """
            add_seals(data_descriptor, FIXED_SIZE | _F_SEAL_SEAL)
""",
        ("test_segment.py::test_nobody_else_can_map_the_data_file_to_write",),
    ),
    # --- remote readers ---
    Bug(
        "messages taken again that were sent again after a cut",
        "remote/reader_link.py",
        """
        if number < ring.n_arrived:  # sent again after a cut
            return
""",
        """
        pass
""",
        ("test_remote.py::test_message_that_is_sent_again_is_taken_once",),
    ),
    Bug(
        "released when it was sent, not when it was acknowledged",
        "remote/writer_link.py",
        """
        if is_sent:
            connection.next_number = number + 1
""",
        """
        if is_sent:
            connection.next_number = number + 1
            peer.acked = number + 1
""",
        ("test_remote.py::test_full_window_names_the_rank",),
    ),
    Bug(
        "sent to every reader of a host",
        "remote/writer_link.py",
        """
                if connection.via is not None and number >= connection.via_from:
                    connection.next_number = number + 1
                elif not self._send_message(peer, connection):
                    self._is_behind = True
                    continue
""",
        """
                if not self._send_message(peer, connection):
                    self._is_behind = True
                    continue
""",
        ("test_relay.py::test_once_per_host",),
    ),
    Bug(
        "unknown keys let in",
        "remote/loop.py",
        """
            code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
""",
        """
            code, text = (b"200", b"OK")
""",
        ("test_remote.py::test_wrong_reader_is_kept_out[unknown key]",),
    ),
)

#: Stores that must be releases; the thread sanitizer reports each.
RACES: Final = (
    Bug(
        "published counter",
        "_ring.pyx",
        """
        store_release(self.published_word, self.published)
""",
        """
        store_relaxed(self.published_word, self.published)
""",
    ),
    Bug(
        "cursor",
        "_ring.pyx",
        """
        store_release(self.cursor_word, self.cursor)
""",
        """
        store_relaxed(self.cursor_word, self.cursor)
""",
    ),
    Bug(
        "given-up word",
        "_ring.pyx",
        """
    raise_to(&given_up[slot], use)
""",
        """
    store_relaxed(&given_up[slot], use)
""",
    ),
)

#: The address sanitizer reports it.
OVERRUN: Final = Bug(
    "one item too many",
    "_ring.pyx",
    """
        for index in range(count):
            memcpy(destination + 8 * index, source + index * stride_bytes, 8)
""",
    """
        for index in range(count + 1):
            memcpy(destination + 8 * index, source + index * stride_bytes, 8)
""",
)
