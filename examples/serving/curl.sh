#!/bin/sh
# Requests to `penstock serve` with curl: curl.sh [URL]. The API key is that of OPENAI_API_KEY.
set -eu
url="${1:-http://127.0.0.1:8000}"

request() {
    path="$1"
    shift
    curl --silent --show-error --fail-with-body --no-buffer "$url$path" \
        --header "Authorization: Bearer ${OPENAI_API_KEY:-none}" --header "Content-Type: application/json" "$@"
    echo
}

request /health
request /v1/models
model="${MODEL:-$(request /v1/models | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)}"

echo "A completion:"
request /v1/completions --data "{\"model\": \"$model\", \"prompt\": \"ROMEO:\", \"max_tokens\": 32, \"temperature\": 0.7}"

echo "A chat, streamed:"
request /v1/chat/completions --data "{
    \"model\": \"$model\",
    \"messages\": [{\"role\": \"user\", \"content\": \"What is 47 + 38?\"}],
    \"max_completion_tokens\": 32,
    \"stream\": true,
    \"stream_options\": {\"include_usage\": true}
}"

echo "One of two answers:"
request /v1/chat/completions --data "{
    \"model\": \"$model\",
    \"messages\": [{\"role\": \"user\", \"content\": \"Is 7 a prime number?\"}],
    \"structured_outputs\": {\"choice\": [\"yes\", \"no\"]}
}"
