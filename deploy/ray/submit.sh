#!/usr/bin/env bash
# Starts Headrace on a Ray cluster as a Ray job: it runs on the head until `ray job stop headrace`, whatever becomes of
# this terminal. Arguments go to `headrace up`: sizes, say, or settings.
#
#   ray dashboard cluster.yaml &        the head's port 8265 here
#   ./submit.sh --prefill 2 --decode 4
set -euo pipefail

: "${RAY_API_SERVER_ADDRESS:=http://127.0.0.1:8265}" # of the head's dashboard
: "${JOB_ID:=headrace}"
: "${HEADRACE:=/opt/headrace/venv/bin/headrace}" # on the head
: "${CONFIG:=/opt/headrace/etc/headrace.yaml}"   # on the head
: "${STOP_WAIT_S:=180}" # longer than it takes to drain: Ray's own 3 s would cut off what runs

export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
exec ray job submit --address "$RAY_API_SERVER_ADDRESS" --submission-id "$JOB_ID" --no-wait \
  --runtime-env-json "{\"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"$STOP_WAIT_S\"}}" \
  -- "$HEADRACE" up --address auto --config "$CONFIG" "$@"
