"""OnLoop: the event loop as a `Site` for preparing light bodies. Long new texts are encoded in a thread."""

from router.answers.grammar_check import CheckedGrammar, WishedGrammar
from router.api.asked import Asked
from router.api.context import ApiContext
from router.api.sampling import check_text_length
from router.prompt.catalog import ServedModel
from router.prompt.text_model import TextModel
from router.turns import LongWork


class OnLoop:
    """For one request."""

    __slots__ = ("_asked", "_context", "_work", "has_history", "max_choices", "max_prompts")

    is_bounded = True

    def __init__(self, context: ApiContext, asked: Asked) -> None:
        self._context = context
        self._asked = asked
        self._work: LongWork | None = None
        self.max_choices = context.config.max_choices
        self.max_prompts = context.config.max_prompts
        self.has_history = context.history.is_on

    def model(self, name: str, salt: str | None) -> ServedModel:
        caller = self._asked.caller
        return self._context.catalog.get(name).within(caller.namespace, salt).bounded(caller.max_context)

    async def encode(
        self,
        model: TextModel,
        text: str,
        parameter: str,
        *,
        add_special_tokens: bool = False,
        is_quoted: bool = False,
    ) -> list[int]:
        check_text_length(model, text, parameter)
        return await model.tokenizer.encode_async(
            text, add_special_tokens=add_special_tokens, is_quoted=is_quoted
        )

    async def check(self, wished: WishedGrammar, salt: str | None) -> CheckedGrammar:
        namespace = self._asked.caller.namespace, salt
        return await self._context.grammars.checked(wished, namespace, self._asked.share_owner)

    async def give_way(self) -> None:
        self._work = self._work or self._context.turns.long_work()
        await self._work.give_way()
