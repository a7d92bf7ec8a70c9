"""The proof of a shared secret: both sides agree, nobody else does, and nothing recorded or altered is of use."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.utils.secret import MAX_BYTES, MIN_BYTES, Secret
from llm_datadist.wire import auth, messages
from llm_datadist.wire.auth import AuthError, Connecting, Listening, OnceOnly
from llm_datadist.wire.data import Greeting
from net_helpers import logged

if TYPE_CHECKING:
    from pathlib import Path

SECRET = Secret(b"a secret of many bytes")
OTHER = Secret(b"a secret of many bites")
TOKEN = bytes(range(16))
HELLO, WELCOME = b"this is who I am", b"and this is who I am"


def shake(left: Secret, right: Secret) -> tuple[Connecting, Listening]:
    """Both sides after their introductions."""
    client = Connecting(left)
    server = Listening(right, client.greet())
    assert server.hello(client.hello(server.challenge(), HELLO)) == HELLO
    assert client.answer(server.answer(WELCOME)) == WELCOME
    return client, server


def test_both_sides_get_one_key_that_no_other_link_has() -> None:
    client, server = shake(SECRET, SECRET)
    assert client.link_key() == server.link_key()
    assert len({client.link_key(), shake(SECRET, SECRET)[0].link_key(), auth.NO_KEY}) == 3


def test_the_connecting_side_needs_the_secret() -> None:
    with pytest.raises(AuthError, match="connecting side has not proved") as caught:
        shake(OTHER, SECRET)
    assert "LLM_DATADIST_SECRET_FILE" in str(caught.value)


def test_the_listening_side_needs_the_secret() -> None:
    """One that takes any introduction for good."""
    client = Connecting(SECRET)
    rogue = Listening(OTHER, client.greet())
    client.hello(rogue.challenge(), HELLO)
    with pytest.raises(AuthError, match="listening side has not proved"):
        client.answer(rogue.answer(WELCOME))


def test_what_was_recorded_proves_nothing_to_either_side() -> None:
    client = Connecting(SECRET)
    greet = client.greet()
    server = Listening(SECRET, greet)
    challenge = server.challenge()
    sealed = client.hello(challenge, HELLO)
    server.hello(sealed)
    answer = server.answer(WELCOME)
    with pytest.raises(AuthError):
        Listening(SECRET, greet).hello(sealed)
    again = Connecting(SECRET)
    again.hello(challenge, HELLO)
    with pytest.raises(AuthError):
        again.answer(answer)


def test_what_a_side_has_sent_is_not_taken_back_as_the_other_ones() -> None:
    client = Connecting(SECRET)
    server = Listening(SECRET, client.greet())
    sealed = client.hello(server.challenge(), HELLO)
    with pytest.raises(AuthError):
        client.answer(sealed)


@settings(deadline=None, max_examples=200)
@given(which=st.sampled_from(["greet", "challenge", "hello", "welcome"]), bit=st.integers(0, 8 * 16 - 1))
def test_no_bit_of_an_introduction_can_be_altered_on_its_way(which: str, bit: int) -> None:
    def way(name: str, data: bytes) -> bytes:
        if name != which:
            return data
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        return bytes(altered)

    def shake_hands() -> None:
        client = Connecting(SECRET)
        server = Listening(SECRET, messages.Greet(nonce=way("greet", client.greet().nonce)))
        challenge = messages.Challenge(nonce=way("challenge", server.challenge().nonce))
        hello = client.hello(challenge, HELLO)
        server.hello(messages.Sealed(payload=way("hello", hello.payload), proof=hello.proof))
        welcome = server.answer(WELCOME)
        client.answer(messages.Sealed(payload=way("welcome", welcome.payload), proof=welcome.proof))

    with pytest.raises(AuthError):
        shake_hands()


def test_where_one_message_ends_and_the_next_begins_cannot_be_altered() -> None:
    assert auth._proof(b"k", b"label", b"ab", b"c") != auth._proof(b"k", b"label", b"a", b"bc")
    assert auth._proof(b"k", b"label", b"ab") != auth._proof(b"k", b"label", b"ab", b"")


# What belongs to a link


@settings(deadline=None)
@given(number=st.integers(0, 2**64 - 1), serve=st.booleans())
def test_a_data_greeting_is_proved_for_its_link_number_and_direction_alone(number: int, serve: bool) -> None:
    key = b"key of the link"
    good = Greeting.make(key, TOKEN, number, serve=serve)
    assert good.proves(key)
    assert not good.proves(b"key of another")
    assert not good.proves(auth.NO_KEY)
    for token, other, direction in (
        (TOKEN, number ^ 1, serve),
        (TOKEN, number, not serve),
        (TOKEN[::-1], number, serve),
    ):
        assert not Greeting(token, other, direction, good.proof).proves(key)
    assert good.answer(key) not in (good.proof, good.answer(b"key of another"))


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=100))
def test_each_number_is_accepted_once(numbers: list[int]) -> None:
    once, seen = OnceOnly(), set()
    for number in numbers:
        assert once.accept(number) == (number not in seen)
        seen.add(number)


def test_numbers_far_behind_are_refused_because_nobody_knows_them_any_more() -> None:
    once = OnceOnly()
    assert once.accept(1)
    assert once.accept(2**64 - 1)
    assert not once.accept(2)
    assert once.accept(2**64 - 1 - 4095)
    assert not once.accept(2**64 - 1 - 4096)
    assert once._seen.bit_length() <= 4096


# The secret


def test_a_secret_shows_itself_to_nobody() -> None:
    for shown in (repr(SECRET), str(SECRET), f"{SECRET}", repr(Connecting(SECRET)), repr([SECRET])):
        assert "many bytes" not in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(SECRET)


@pytest.mark.parametrize("size", [0, MIN_BYTES - 1, MAX_BYTES + 1])
def test_what_is_no_secret_is_refused_without_being_told(size: int) -> None:
    with pytest.raises(ValueError, match=f"it has {size} bytes") as caught:
        Secret(b"x" * size)
    assert "xx" not in str(caught.value)


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET.reveal() + b"\r\n\n")
    path.chmod(0o600)
    with logged() as records:
        assert Secret.from_file(str(path)).reveal() == SECRET.reveal()
    assert records == []
    path.chmod(0o644)
    with logged() as records:
        Secret.from_file(str(path))
    assert [record.getMessage() for record in records] == [
        f"every user of this host can read the secret in {path}: chmod 600"
    ]


def test_files_that_hold_no_secret(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Secret.from_file(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no regular file"):
        Secret.from_file("/dev/zero")
    long = tmp_path / "long"
    long.write_bytes(bytes(1 << 20))
    with pytest.raises(ValueError, match="a secret has 16 to 4096"):
        Secret.from_file(str(long))
