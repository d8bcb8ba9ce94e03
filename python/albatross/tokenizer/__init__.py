"""Everything that turns text into token ids and back: vocabulary, chat template, streaming decoder, stop strings."""

from albatross.tokenizer.chat import AnswerTrimmer, ChatMessage, begins_answer, render_chat
from albatross.tokenizer.incremental import IncrementalDecoder
from albatross.tokenizer.stops import StopMatcher
from albatross.tokenizer.world import WorldTokenizer

__all__ = [
    "AnswerTrimmer",
    "ChatMessage",
    "IncrementalDecoder",
    "StopMatcher",
    "WorldTokenizer",
    "begins_answer",
    "render_chat",
]
