"""Request and response models of webhooks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, Field

from headwater.servers.http.requests import BindingCreate, RequestModel, Text
from headwater.servers.http.responses import Time
from headwater.servers.http.setting_fields import changed_settings, new_settings, shown_settings
from headwater.setting_definitions import changeable, definitions
from headwater.webhooks.settings import NEW_WEBHOOK_SETTINGS, WebhookSettings

WebhookName = Annotated[str, Path(min_length=1, max_length=200, description="the webhook's name", examples=["shop"])]


@new_settings(NEW_WEBHOOK_SETTINGS)
class WebhookCreate(RequestModel):
    """A webhook to create: a URL and the events to send."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    url: Annotated[str, Field(min_length=1, max_length=2000, examples=["https://shop.example/hooks"])]
    bindings: list[BindingCreate] = Field(default_factory=list, max_length=100)
    filter: Annotated[str, Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, description="send the events that this SQL filter matches, from now on, instead of bound events"
    )
    params: dict[str, Any] | None = Field(default=None, description="parameters, available in the filter as s.params")
    from_end: bool = Field(default=True, description="only events published from now on")


@changed_settings(changeable(WebhookSettings))
class WebhookUpdate(RequestModel):
    """Webhook settings to change. Omitted settings stay unchanged; null or 0 removes a limit."""

    url: Annotated[str, Field(min_length=1, max_length=2000)] | None = None


class PauseReason(RequestModel):
    reason: Text | None = None


@shown_settings(definitions(WebhookSettings))
class WebhookInfo(BaseModel):
    """A webhook without its secrets. Retries and dead letters belong to its queue."""

    name: str
    queue: str
    url: str
    state: Literal["active", "paused", "disabled"]
    state_reason: str | None
    created_at: Time
    updated_at: Time


class WebhookWithSecret(WebhookInfo):
    secret: str = Field(description="signs the requests; shown only in this response")


class WebhookList(BaseModel):
    webhooks: list[WebhookInfo]


class WebhookTestResult(BaseModel):
    """The result of a test: the status and beginning of the response, or the error."""

    webhook: str
    accepted: bool
    message_id: str
    status: int | None
    latency_ms: float
    response: str
    error: str | None
