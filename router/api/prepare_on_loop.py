"""OnLoop: prepares light bodies on the event loop. Long new texts are encoded in a thread."""

from router.answers.grammar_check import CheckedGrammar, WishedGrammar
from router.api.api_request import ApiRequest
from router.api.context import ApiContext
from router.api.prepare import Site
from router.api.sampling import check_text_length
from router.prompt.text_model import TextModel
from router.turns import LongWork


class OnLoop(Site):
    """For one request. Raises TooMuchWork for what takes long."""

    __slots__ = ("_asked", "_context", "_work")

    def __init__(self, context: ApiContext, asked: ApiRequest) -> None:
        config = context.config
        super().__init__(
            context.catalog,
            config.max_choices,
            config.max_prompts,
            bool(context.hooks.encoded),
            config.pass_fields,
            is_bounded=True,
        )
        self._context = context
        self._asked = asked
        self._work: LongWork | None = None

    def model(self, name: str, salt: str | None) -> TextModel:
        caller = self._asked.caller
        return self._context.catalog.get(name).within(caller.namespace, salt).bounded(caller.max_context)

    async def encode(self, model: TextModel, text: str, parameter: str, **options: bool) -> list[int]:
        check_text_length(model, text, parameter)
        return await model.tokenizer.encode_async(text, **options)

    async def check(self, wished: WishedGrammar, salt: str | None) -> CheckedGrammar:
        namespace = self._asked.caller.namespace, salt
        return await self._context.grammars.checked(wished, namespace, self._asked.share_owner)

    async def give_way(self) -> None:
        self._work = self._work or self._context.turns.long_work()
        await self._work.give_way()
