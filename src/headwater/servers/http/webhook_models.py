"""What requests and answers about webhooks are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, Field

from headwater.servers.http.requests import BindingToMake, Name, Number, Seconds, Shape, Text
from headwater.servers.http.responses import Time

WebhookName = Annotated[str, Path(min_length=1, max_length=200, description="the webhook's name", examples=["shop"])]
Header = Annotated[str, Field(max_length=2000)]


class WebhookSettings(Shape):
    """Settings of a webhook."""

    headers: dict[Name, Header] | None = None
    body: Literal["envelope", "raw"] | None = None
    timeout_seconds: Seconds | None = None
    max_concurrency: Number | None = None
    rate_per_second: Seconds | None = Field(default=None, description="0: as fast as it goes")
    gzip_above_bytes: Number | None = Field(default=None, description="0: never")
    client_errors: Literal["retry", "dead"] | None = Field(default=None, description="what an answer of 4xx means")


class WebhookToMake(WebhookSettings):
    """A webhook: a URL, and the events that go there."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    url: Annotated[str, Field(min_length=1, max_length=2000, examples=["https://shop.example/hooks"])]
    bindings: list[BindingToMake] = Field(default_factory=list, max_length=100)
    filter: Annotated[str, Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, description="send what this SQL filter matches, from now on, instead of what bindings select"
    )
    params: dict[str, Any] | None = Field(default=None, description="what the filter sees as s.params")
    from_end: bool = Field(default=True, description="only what is published from now on")


class WebhookChanges(WebhookSettings):
    url: Annotated[str, Field(min_length=1, max_length=2000)] | None = None


class Reason(Shape):
    reason: Text | None = None


class WebhookAnswer(BaseModel):
    """A webhook, without its secrets. Its retries, and what died, are its group's."""

    name: str
    group: str
    url: str
    headers: dict[str, str]
    body: Literal["envelope", "raw"]
    timeout_seconds: float
    max_concurrency: int | None
    rate_per_second: float | None
    gzip_above_bytes: int | None
    client_errors: Literal["retry", "dead"]
    state: Literal["active", "paused", "disabled"]
    state_reason: str | None
    created_at: Time
    updated_at: Time


class WebhookWithSecret(WebhookAnswer):
    secret: str = Field(description="signs what is sent; shown only now")


class WebhookList(BaseModel):
    webhooks: list[WebhookAnswer]


class Tested(BaseModel):
    """What came of a test: the answer's status and the beginning of its body, or why there was none."""

    webhook: str
    accepted: bool
    message_id: str
    status: int | None
    latency_ms: float
    response: str
    error: str | None
