"""Channel: the supervisor's end of its socket to the kernel."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from air_magic.channel import BACKLOG, Channel
from air_magic.events import Event, NodeEnded, Output, Reader, decode, frame


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """The kernel's end and the supervisor's."""
    kernel, handle = socket.socketpair()
    kernel.settimeout(30)
    with kernel, handle:
        yield kernel, Channel(handle)


def received(kernel: socket.socket) -> list[Event]:
    """Every event until the end of the stream."""
    reader, events = Reader(), []
    while data := kernel.recv(1 << 20):
        events += [decode(message) for message in reader.feed(data)]
    return events


def test_the_first_message_is_waited_for(ends: tuple[socket.socket, Channel]) -> None:
    """However many pieces it comes in; after it nothing blocks any more."""
    kernel, channel = ends
    orders = frame({"env": {"A": "b" * (1 << 20)}})
    sender = threading.Thread(target=kernel.sendall, args=(orders,))
    sender.start()
    assert channel.first() == {"env": {"A": "b" * (1 << 20)}}
    sender.join()
    assert (list(channel.receive()), channel.open) == ([], True)


def test_commands_come_in_order(ends: tuple[socket.socket, Channel]) -> None:
    """Several at once, and half of one later."""
    kernel, channel = ends
    kernel.sendall(frame({}))
    channel.first()
    stop = frame({"stop": "cancel", "kill": False})
    kernel.sendall(stop + stop[:5])
    assert list(channel.receive()) == [{"stop": "cancel", "kill": False}]
    kernel.sendall(stop[5:])
    assert list(channel.receive()) == [{"stop": "cancel", "kill": False}]


def test_a_command_may_come_together_with_the_first_message(ends: tuple[socket.socket, Channel]) -> None:
    """It is there although the socket has nothing more to read."""
    kernel, channel = ends
    kernel.sendall(frame({}) + frame({"stop": "cancel", "kill": False}))
    channel.first()
    assert (list(channel.receive()), channel.open) == ([{"stop": "cancel", "kill": False}], True)


def test_a_command_that_comes_with_the_first_message_is_not_lost(ends: tuple[socket.socket, Channel]) -> None:
    """The socket will not tell of it again."""
    kernel, channel = ends
    kernel.sendall(frame({}) + frame({"stop": "cancel", "kill": True}))
    assert channel.first() == {}
    assert list(channel.receive()) == [{"stop": "cancel", "kill": True}]
    assert (list(channel.receive()), channel.open) == ([], True)


def test_a_kernel_that_went_before_gives_no_orders(ends: tuple[socket.socket, Channel]) -> None:
    """Half of them do not count."""
    kernel, channel = ends
    kernel.sendall(frame({"env": {}})[:3])
    kernel.close()
    assert channel.first() is None


def test_a_kernel_that_does_not_read_blocks_nobody(ends: tuple[socket.socket, Channel]) -> None:
    """What it has not taken waits in order, and says from when on output is better kept back."""
    kernel, channel = ends
    kernel.sendall(frame({}))
    channel.first()
    assert (channel.interest, channel.crowded, channel.flush()) == (selectors.EVENT_READ, False, True)
    events: list[Event] = []
    while not channel.crowded:
        events.append(Output(0, f"{len(events)} " + "x" * (1 << 16)))
        channel.send(events[-1])
    assert BACKLOG < len(events) << 16 < BACKLOG + (1 << 21)
    assert (channel.interest, channel.flush()) == (selectors.EVENT_READ | selectors.EVENT_WRITE, False)
    last = NodeEnded(0)
    channel.send(last)
    seen: list[Event] = []
    reader = threading.Thread(target=lambda: seen.extend(received(kernel)))
    reader.start()
    channel.finish()
    channel._socket.shutdown(socket.SHUT_WR)
    reader.join(30)
    assert seen == [*events, last]


def test_a_kernel_that_is_gone_is_noticed(ends: tuple[socket.socket, Channel]) -> None:
    """By who reads and by who writes; later events go nowhere, silently."""
    kernel, channel = ends
    kernel.sendall(frame({}))
    channel.first()
    channel.send(Output(0, "never read"))
    kernel.close()
    assert (list(channel.receive()), channel.open) == ([], False)
    channel.send(Output(0, "x"))
    assert channel.flush()
    channel.finish()


def test_a_kernel_that_goes_in_the_middle_of_a_message_is_noticed(ends: tuple[socket.socket, Channel]) -> None:
    """The rest of the message is forgotten."""
    kernel, channel = ends
    kernel.sendall(frame({}))
    channel.first()
    while not channel.crowded:
        channel.send(Output(0, "x" * (1 << 18)))
    kernel.close()
    assert (channel.flush(), channel.open) == (True, False)
    channel.finish()
