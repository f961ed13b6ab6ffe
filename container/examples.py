"""Example calls, printed once the model answers, for whoever started the server by hand.

Must not know: the model, the processes; it asks /ping and /v1/models like any client.
"""

import http.client
import json
import sys
import textwrap
import threading
import time

from container.settings import Settings

_POLL_S = 0.3
_QUESTION = "What is deep learning?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]


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
    return (
        f"\nReady at {_url(settings)}. From another terminal:\n\n"
        + textwrap.indent(curl_call(settings), "  ")
        + "\nWith OpenAI's client:\n\n"
        + textwrap.indent(openai_program(settings, model), "  ")
        + "\nWith SageMaker's (for a real endpoint leave come_here and the keys out):\n\n"
        + textwrap.indent(boto3_program(settings), "  ")
        + "\n"
    )


def curl_call(settings: Settings) -> str:
    """For a shell: a streamed answer from /invocations."""
    # A key itself stays off the screen: the shell puts it in.
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    return (
        f"curl -N {_url(settings)}/invocations{key} -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps({**_body(settings), 'stream': True})}'\n"
    )


def openai_program(settings: Settings, model: str) -> str:
    """A Python program that prints an answer."""
    key = "os.environ['API_KEY']" if settings.api_key else "'none is needed'"
    return (
        "import os, openai\n"
        f"client = openai.OpenAI(base_url='{_url(settings)}/v1', api_key={key})\n"
        "answer = client.chat.completions.create(\n"
        f"    model={model!r}, max_tokens=60,\n"
        f"    messages={_MESSAGES})\n"
        "print(answer.choices[0].message.content)\n"
    )


def boto3_program(settings: Settings) -> str:
    """A Python program that prints an answer's JSON; boto3 has no option for such an address."""
    key = "    request.headers['Authorization'] = 'Bearer ' + os.environ['API_KEY']\n"
    return (
        "import boto3, json, os\n"
        "def come_here(request, **_):\n"
        f"    request.url = '{_url(settings)}/invocations'\n"
        f"{key if settings.api_key else ''}"
        "client = boto3.client('sagemaker-runtime', region_name='us-east-1',\n"
        "    aws_access_key_id='any', aws_secret_access_key='any')\n"
        "client.meta.events.register('before-send', come_here)\n"
        "answer = client.invoke_endpoint(\n"
        "    EndpointName='my-endpoint', ContentType='application/json',\n"
        f"    Body=json.dumps({_body(settings)}))\n"
        "print(json.load(answer['Body']))\n"
    )


def _url(settings: Settings) -> str:
    host = _local_host(settings.host).replace("127.0.0.1", "localhost")
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _body(settings: Settings) -> dict[str, object]:
    if settings.invocations_mode == "generate":
        return {"inputs": _QUESTION, "parameters": {"max_new_tokens": 60}}
    return {"messages": _MESSAGES, "max_tokens": 60}
