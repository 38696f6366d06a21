"""Ctrl-C where it must wait."""

import signal
import threading

import pytest

from transformers_neuronx.support.interrupts import held_back


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_a_block(handler):
    steps = []

    def run():
        with held_back():
            signal.raise_signal(signal.SIGINT)
            steps.append("the rest of the block")
        steps.append("what comes after")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["the rest of the block"] and signal.getsignal(signal.SIGINT) is handler


def test_an_error_of_a_block_stays_and_other_threads_run_as_they_are(handler):
    with pytest.raises(ValueError, match="wrong"), held_back():
        raise ValueError("wrong")
    ran = []

    def run():
        with held_back():
            ran.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [handler]
