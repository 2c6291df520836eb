#!/bin/sh
# Runs each target for some seconds (default 60) and fails at the first finding: run.sh [SECONDS]
set -eu
cd "$(dirname "$0")"
seconds=${1:-60}
[ -d corpus ] || cargo run --no-default-features --example seeds
for target in cmf tools shards gguf source ninfer safetensors tokenizer template; do
    cargo fuzz run -s none --fuzz-dir . "$target" -- \
        -max_total_time="$seconds" -timeout=1 -rss_limit_mb=2048 -max_len=65536
done
