"""Example calls, printed once the model answers, for whoever started the server by hand.

Must not know: the model, the processes; it asks /ping and /v1/models like any client.
"""

import http.client
import json
import sys
import threading
import time

from container.settings import Settings

_POLL_S = 0.3
_QUESTION = "What is deep learning?"


def print_when_ready(settings: Settings) -> None:
    """In a thread that ends with the process: wait for /ping to say 200, then print."""
    threading.Thread(target=_wait_and_print, args=(settings,), name="examples", daemon=True).start()


def _wait_and_print(settings: Settings) -> None:
    while _get(settings, "/ping") is None:
        time.sleep(_POLL_S)
    models = _get(settings, "/v1/models")
    model = json.loads(models)["data"][0]["id"] if models else "default"
    sys.stdout.write(text(settings, model))
    sys.stdout.flush()


def _get(settings: Settings, path: str) -> bytes | None:
    """The body of a 200, else None."""
    connection = http.client.HTTPConnection(_local_host(settings.host), settings.port, timeout=2)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == http.client.OK else None


def _local_host(host: str) -> str:
    """An address to call: one that stands for all interfaces cannot be called everywhere."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def text(settings: Settings, model: str) -> str:
    """Calls for the API that /invocations speaks here, OpenAI's client, and SageMaker's."""
    host = _local_host(settings.host).replace("127.0.0.1", "localhost")
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    message = [{"role": "user", "content": _QUESTION}]
    body: dict[str, object]
    if settings.invocations_mode == "generate":
        body = {"inputs": _QUESTION, "parameters": {"max_new_tokens": 60}}
    else:
        body = {"messages": message, "max_tokens": 60}
    # The key itself stays off the screen; the shell puts it in.
    header = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    api_key = "os.environ['API_KEY']" if settings.api_key else "'unused'"
    lines = (
        f"Ready at {url}. From another terminal:",
        "",
        f"  curl -N {url}/invocations{header} -H 'Content-Type: application/json' \\",
        f"    -d '{json.dumps({**body, 'stream': True})}'",
        "",
        "With OpenAI's client:",
        "",
        "  import os, openai",
        f"  client = openai.OpenAI(base_url='{url}/v1', api_key={api_key})",
        f"  message = {message}",
        "  answer = client.chat.completions.create(",
        f"      model={model!r}, messages=message, max_tokens=60)",
        "  print(answer.choices[0].message.content)",
        "",
        "On SageMaker, where ENDPOINT is the name of your endpoint:",
        "",
        "  import boto3, json",
        "  answer = boto3.client('sagemaker-runtime').invoke_endpoint(",
        "      EndpointName=ENDPOINT, ContentType='application/json',",
        f"      Body=json.dumps({body}))",
        "  print(json.load(answer['Body']))",
    )
    return "\n" + "\n".join(lines) + "\n\n"
