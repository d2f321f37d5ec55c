"""The options of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

from .options import Checked, option


@dataclass(frozen=True)
class ServerConfig(Checked):
    """The HTTP side."""

    served_model_name: tuple[str, ...] | None = option(
        None,
        "Names that clients may use for the model; answers carry the first.",
        kind="strs",
        default_text="the folder's or file's name, or that of the Hub as given",
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(
        8000, "Port to listen on; 0 picks a free one.", kind="int", least=0, most=65535
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on, in place of --host and --port.",
        default_text="TCP",
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate to serve HTTPS with.", default_text="plain HTTP"
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the certificate's private key, without a passphrase.",
        default_text="the certificate's file",
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file with authorities; clients must show a certificate of one of them.",
        default_text="no client certificate is asked for",
    )
    root_path: str = option(
        "", "Path under which a proxy offers the server, as in /llm.", default_text="none"
    )
    allowed_origins: tuple[str, ...] | None = option(
        None,
        "Origins whose web pages may call the server (CORS), as in https://example.org; * is all.",
        kind="strs",
        default_text="no CORS headers",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), "Methods that such pages may use; * is all.", kind="strs", default_text="*"
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "Headers that such pages may send; * is all.", kind="strs", default_text="*"
    )
    allow_credentials: bool = option(
        False, "Let such pages send cookies and the like.", kind="bool"
    )
    sse_keep_alive_interval: float = option(
        0.0,
        "A stream that was silent for so long gets a comment, so that proxies keep it open; 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )
    client_stall_timeout: float = option(
        60.0,
        "A client that takes nothing more of its answer, or sends nothing more of its request, for so long is cut "
        "off; 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Offer GET /tokenizer_info, which tells the chat template.", kind="bool"
    )
    api_key: tuple[str, ...] | None = option(
        None,
        "Keys that clients must send as 'Authorization: Bearer KEY'. Also: OCTAVO_API_KEY.",
        kind="strs",
        default_text="no key is needed",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "File with a name and a key on each line, more of the keys that clients must send. It is read again when it "
        "changes, and on SIGHUP.",
        default_text="no file",
    )
    enable_debug_endpoints: bool = option(
        False,
        "Offer GET /debug/kv and POST /reset_prefix_cache. Not for the open internet.",
        kind="bool",
    )
    response_store_size: int = option(
        1000,
        "Responses of /v1/responses that are kept in memory to be retrieved and continued, the least recently used "
        "going first; 0: none.",
        kind="int",
        least=0,
        most=1_000_000,
    )
    response_store_bytes: int = option(
        256 << 20,
        "Memory for them, about; each counts with its whole conversation.",
        kind="size",
        unit="bytes",
        least=1,
    )
    log_level: str = option(
        "info", "Least severe log lines to print.", choices=("debug", "info", "warning", "error")
    )
    max_engine_restarts: int = option(
        10,
        "An engine process that ends or is stuck is started again, and running requests go on. Deaths in a row, "
        "none of them with a token gained since the one before, after which that is still done; after one more the "
        "server ends. 0: it ends with the first.",
        kind="int",
        least=0,
        most=1_000_000,
    )
    engine_heartbeat_timeout: float = option(
        60.0,
        "An engine process that has not shown for so long that it runs, be it idle, loading or computing, is "
        "stuck: it is killed and started again.",
        kind="float",
        unit="seconds",
        least=1.0,
        most=86400.0,
    )
    engine_step_timeout: float = option(
        600.0,
        "So is one that runs, but has been in one step for so long.",
        kind="float",
        unit="seconds",
        least=1.0,
        most=86400.0,
    )
    request_timeout: float = option(
        0.0,
        "Time that a request may take, its wait in the queue included, before it is ended with an error; "
        "clients may ask for less. 0: as long as it takes.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    enable_log_requests: bool = option(
        False,
        "Log a line for each POST request when its answer has ended: route, status, time and the key's name, never "
        "what it says.",
        kind="bool",
    )
    stats_interval: float = option(
        10.0,
        "Time between two lines of statistics in the log; none while nothing happens. 0: never.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=1e6,
    )
    flight_recorder_steps: int = option(
        256,
        "Last steps of the engine that are kept for GET /debug/steps, and of which the end is logged when it dies.",
        kind="int",
        least=1,
        most=100_000,
    )
    drain_delay: float = option(
        0.0,
        "Time after SIGTERM in which /ready is 503 already and requests are still taken, so that gateways "
        "look elsewhere before anything is refused; Ctrl-C has none.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )
    shutdown_timeout: float = option(
        0.0,
        "Time that running requests get to finish after Ctrl-C, or after SIGTERM and --drain-delay, before they end "
        "with finish reason 'abort'.",
        kind="float",
        unit="seconds",
        least=0.0,
        most=3600.0,
    )
