#!/bin/sh
# Runs every target for so many seconds each: run.sh [seconds]. Ends with an error at the first finding.
set -eu
cd "$(dirname "$0")"
seconds=${1:-60}
[ -d corpus ] || cargo run --no-default-features --example seeds
for target in cmf tools parts gguf safetensors tokenizer template; do
    cargo fuzz run -s none --fuzz-dir . "$target" -- \
        -max_total_time="$seconds" -timeout=1 -rss_limit_mb=2048 -max_len=65536
done
