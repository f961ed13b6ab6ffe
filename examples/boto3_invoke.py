"""A SageMaker endpoint's client, boto3: a chat, TGI's form, and an error.

    python examples/boto3_invoke.py [BASE_URL]

`pip install boto3`. For a real endpoint leave out everything that `local_client` does but the
first line, and name your endpoint. `invoke_endpoint_with_response_stream` needs the real service:
it wraps the container's bytes in events of AWS's own.
"""

import json
import sys
from typing import Any

import boto3
from botocore.exceptions import ClientError

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
ENDPOINT = "my-endpoint"


def local_client() -> Any:
    """A client whose calls reach the container on this machine instead of SageMaker."""
    client = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        endpoint_url=BASE_URL,
    )
    # SageMaker maps /endpoints/NAME/invocations to the container's /invocations; so must we.
    client.meta.events.register(
        "before-send.sagemaker-runtime.*",
        lambda request, **_: setattr(request, "url", f"{BASE_URL}/invocations"),
    )
    return client


def invoke(client: Any, body: dict[str, Any]) -> Any:
    """The JSON answer to a body."""
    answer = client.invoke_endpoint(
        EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps(body)
    )
    return json.load(answer["Body"])


client = local_client()

messages = [{"role": "user", "content": "What is deep learning?"}]
chat = invoke(client, {"messages": messages, "max_tokens": 40})
print("Chat:", chat["choices"][0]["message"]["content"])

parameters = {"max_new_tokens": 10, "return_full_text": False}
(text,) = invoke(client, {"inputs": "The capital of France is", "parameters": parameters})
print("Text:", text["generated_text"])

try:
    invoke(client, {"messages": messages, "temperature": 9})
except ClientError as error:
    # SageMaker says ModelError (424) and has the container's own answer in these two; the container
    # alone answers 400.
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    print("Refused, as it should be:", error.response.get("OriginalStatusCode", status))
    print(error.response.get("OriginalMessage", ""))
