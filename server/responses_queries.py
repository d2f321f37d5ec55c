"""What may stand behind the question mark of the routes that read a stored response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field
from starlette.datastructures import QueryParams

from ..engine.errors import InvalidRequestError
from .responses_items import Item
from .responses_request import check_include
from .schemas import Schema, Wire, parse


class RetrieveQuery(Wire):
    """Of ``GET /v1/responses/{response_id}``."""

    model_config = ConfigDict(strict=False)  # a query is text

    stream: bool | None = Field(None, description="The events of a response in the background.")
    starting_after: int | None = Field(
        None, ge=0, description="Only events with a higher sequence_number; needs stream."
    )
    include_obfuscation: Literal["false", None] = None


class InputItemsQuery(Wire):
    """Of ``GET /v1/responses/{response_id}/input_items``."""

    model_config = ConfigDict(strict=False)

    limit: int = Field(20, ge=1, le=100, description="Most items of one answer.")
    order: Literal["asc", "desc"] = Field("desc", description="desc: the last item comes first.")
    after: str | None = Field(None, description="The last item of the page before.")


def parse_query(schema: type[Schema], params: QueryParams) -> Schema:
    """The query, checked. ``include`` may name parts that are never there; what is there is always told.

    Raises:
        InvalidRequestError: a value is wrong; ``param`` names it.
    """
    check_include([*params.getlist("include"), *params.getlist("include[]")])
    return parse(schema, dict(params))


def query_schema(schema: type[Wire]) -> dict[str, Any]:
    """The OpenAPI description of a route with this query."""
    properties = schema.model_json_schema()["properties"]
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": shape}
            for name, shape in properties.items()
        ]
    }


def page(items: Sequence[Item], query: InputItemsQuery) -> dict[str, Any]:
    """A part of ``items`` as OpenAI's list.

    Raises:
        InvalidRequestError: no item has the id of ``after``.
    """
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    start = 0
    if query.after is not None:
        ids = [item.id for item in ordered]
        if query.after not in ids:
            raise InvalidRequestError("after must be the id of an input item.", param="after")
        start = ids.index(query.after) + 1
    data = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": [item.as_dict() for item in data],
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": start + query.limit < len(ordered),
    }
