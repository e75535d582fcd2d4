"""Finds where a conversation's prompt may continue from an earlier answer's tokens.

Owns what the router's store is told, which does not see the conversation itself. Runs wherever there is a
tokenizer and a template.
"""

from typing import cast

from replicas.protocol.blocks import pack_token_ids
from router.api.chat_prompt import RenderedChat
from router.api.chat_request import ChatRequest
from router.encoded import EncodedHistory, EncodedTail
from router.history.canonical import conversation_digests, thoughts_of
from router.history.splicing import text_after
from router.prompt.engines import TooMuchWork
from router.prompt.text_model import TextModel


def encoded_history(request: ChatRequest) -> EncodedHistory | None:
    """None where the model is not to begin a new answer, or not to see the conversation's beginning; and of
    one with images, whose tokens would have to be remembered with them."""
    is_cut = request.truncate_prompt_tokens is not None or bool(request.images)
    if is_cut or not request.add_generation_prompt or request.continue_final_message:
        return None
    messages = request.messages
    digests = conversation_digests(request.tools, request.template_arguments, messages)
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    thoughts = cast("dict[int, bytes]", thoughts_of(messages))
    last_answer = answers[-1] if answers else None
    return EncodedHistory(cast("list[bytes]", digests), last_answer, thoughts=thoughts, answers=answers)


def encoded_tail(model: TextModel, chat: RenderedChat, position: int) -> EncodedTail | None:
    """Encode the prompt after the answer at `position`. None if it cannot be located, or if tokens of its
    pieces differ from those of the whole."""
    tokenizer = model.tokenizer
    if not tokenizer.caches_segments:
        return None
    special_tokens = tokenizer.special_tokens
    ends = {name for name in tokenizer.token_strings(model.card.eos_token_ids) if name in special_tokens}
    try:
        behind = text_after(chat.write, chat.text, chat.messages, position, ends_of_turn=ends)
    except TooMuchWork:
        return None
    if behind is None:
        return None
    end, text = behind
    token_ids = tokenizer.encode(text, is_quoted=chat.is_quoted)
    return EncodedTail(position, special_tokens[end], pack_token_ids(token_ids))
