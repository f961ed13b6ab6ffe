#!/usr/bin/env bash
# Every kind of call with plain curl.
#
#     examples/curl.sh [BASE_URL]
set -euo pipefail

url="${1:-http://localhost:8080}"

post() { # PATH BODY: prints the answer; fails where the status is an error
    echo "== POST $1"
    curl --silent --show-error --fail-with-body --no-buffer "$url$1" \
        --header 'Content-Type: application/json' --data "$2"
    echo
}

echo "== GET /ping"
curl --silent --show-error --fail --output /dev/null --write-out '%{http_code}\n' "$url/ping"

echo "== GET /v1/models"
curl --silent --show-error --fail "$url/v1/models"
echo

post /invocations '{"messages":[{"role":"user","content":"What is rain?"}],"max_tokens":20}'
post /invocations '{"messages":[{"role":"user","content":"What is rain?"}],"max_tokens":20,"stream":true}'
post /invocations '{"inputs":"The capital of France is","parameters":{"max_new_tokens":10}}'
post /v1/completions '{"prompt":"The capital of France is","max_tokens":10,"temperature":0}'
post /generate '{"inputs":"The capital of France is","parameters":{"max_new_tokens":5,"details":true}}'
post /generate_stream '{"inputs":"The capital of France is","parameters":{"max_new_tokens":5}}'
post /tokenize '{"inputs":"The capital of France is"}'
