"""The tokenizer as scripts use it, under the names that they know from transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, NotSupportedError
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .offline_prompts import Message, chat_prompt


class ScriptTokenizer:
    """Encodes, decodes and renders chats as the engine does.

    Args:
        tokenizer: does the work.
        chat_template: of the model, if it has one.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.eos_token = tokenizer.eos_token
        self.bos_token = tokenizer.bos_token
        self.vocab_size = tokenizer.vocab_size
        self.all_special_ids = sorted(tokenizer.special_token_ids)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token, if there is one."""
        return self._id_of(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning token, if there is one."""
        return self._id_of(self.bos_token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.special_token_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """The text of these tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds inside a text, U+FFFD where it is no whole characters."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text."""
        return self._tokenizer.token_bytes(token_id)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes these tokens."""
        return self._tokenizer.vocabulary_entries(token_ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """A conversation as a prompt: its text, or with ``tokenize`` its token ids.

        Raises:
            ConfigError: the model has no chat template.
            InvalidRequestError: the conversation does not fit it.
            NotSupportedError: an argument of transformers' that is not offered is given.
        """
        if self._chat_template is None:
            raise ConfigError("This model has no chat template.")
        for name in ("return_tensors", "return_dict", "padding", "truncation", "chat_template"):
            if template_kwargs.pop(name, None):
                raise NotSupportedError(f"{name} is not supported.", param=name)
        prompt = chat_prompt(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        text = self._chat_template.render(prompt)
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text
