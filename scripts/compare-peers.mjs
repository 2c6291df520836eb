// Measures cmf-gpu and llama.cpp. scripts/compare-peers starts this program. Each measurement runs in its own process,
// and the engines take turns, so that other load on the machine affects them equally.
import {execFileSync, spawn} from "node:child_process";
import {readFileSync} from "node:fs";
import {loadavg, cpus} from "node:os";
import {basename, join} from "node:path";
import {fileURLToPath, pathToFileURL} from "node:url";

const [cmfGpu, peers, task, gguf, ...rest] = process.argv.slice(2);
const ROUNDS = 3;
const PROMPTS = [37, 128];
const DECODED = 32;
const PIECE = 16;

const seconds = async (work) => {
    const start = performance.now();
    await work();
    return (performance.now() - start) / 1000;
};
const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};
// The same tokens as in `cmf-gpu bench`.
const tokensOf = (vocab, count) =>
    Array.from({length: count}, (_, i) => Number((BigInt(i) * 2654435761n) % BigInt(vocab)));
const cmf = (...args) => JSON.parse(execFileSync(cmfGpu, [...args, "--json", "-q"], {encoding: "utf8", maxBuffer: 1 << 28}));

async function llama(gpu, contextSize, threads) {
    const path = join(peers, "node_modules/node-llama-cpp/dist/index.js");
    const {getLlama, LlamaLogLevel} = await import(pathToFileURL(path).href);
    const engine = await getLlama({
        gpu, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error, vramPadding: 0, ramPadding: 0
    });
    if (engine.gpu !== gpu)
        throw new Error(`llama.cpp runs on ${engine.gpu || "the CPU"}, expected ${gpu || "the CPU"}`);
    const model = await engine.loadModel({modelPath: gguf, gpuLayers: gpu ? "max" : 0, ignoreMemorySafetyChecks: true});
    const context = await model.createContext({contextSize, batchSize: 512, threads, ignoreMemorySafetyChecks: true});
    return {engine, model, sequence: context.getSequence()};
}

async function firstTokens(sequence, prompt, count) {
    const tokens = [], times = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        times.push(performance.now());
        if (tokens.length === count) break;
    }
    if (tokens.length !== count) throw new Error(`llama.cpp ended after ${tokens.length} of ${count} tokens`);
    return {tokens, times};
}

// One measurement of llama.cpp. Runs in a child process; writes two JSON lines to stdout, the first of them at the first token.
async function peer(gpu, vocab) {
    const {engine, sequence} = await llama(gpu, 256);
    await firstTokens(sequence, tokensOf(vocab, PROMPTS[0]), 1);
    console.log(JSON.stringify({devices: gpu ? await engine.getGpuDeviceNames() : ["CPU"]}));
    const prefill = [], cpu = [];
    const busy = (before) => Object.values(process.cpuUsage(before)).reduce((a, b) => a + b) / 1e6;
    for (const count of PROMPTS) {
        const once = async () => {
            await sequence.clearHistory();
            return count / await seconds(() => firstTokens(sequence, tokensOf(vocab, count), 1));
        };
        await once();
        const before = process.cpuUsage();
        prefill.push(await once());
        cpu.push(busy(before) / count);
    }
    await sequence.clearHistory();
    const before = process.cpuUsage();
    const {times} = await firstTokens(sequence, tokensOf(vocab, 1), DECODED + 1);
    cpu.push(busy(before) / (DECODED + 1));
    console.log(JSON.stringify({prefill, decode: DECODED / ((times[DECODED] - times[0]) / 1000), cpu}));
    process.exit(0);
}

async function measurePeer(gpu, vocab) {
    const start = performance.now();
    const child = spawn(process.execPath,
        [fileURLToPath(import.meta.url), cmfGpu, peers, "peer", gguf, gpu || "cpu", String(vocab)], {stdio: ["ignore", "pipe", "inherit"]});
    let text = "", first;
    for await (const part of child.stdout) {
        first ??= (performance.now() - start) / 1000;
        text += part;
    }
    const lines = text.trim().split("\n").map((line) => JSON.parse(line));
    if (lines.length !== 2) throw new Error("llama.cpp failed; its messages are above");
    return {start: first, ...lines[1], device: lines[0].devices.join(", ")};
}

async function measureOurs(model, vocab) {
    const prompt = tokensOf(vocab, PROMPTS[0]).join(",");
    let device;
    const start = await seconds(() => {
        device = cmf("run", model, "--device", "software", "--ctx", "256", "--greedy", "-n", "1", "--prompt-tokens", prompt).device.name;
    });
    const bench = (...args) => cmf("bench", model, "--device", "software", "-r", "1", ...args).rows.map((row) => row.tok_s);
    const [short, decode] = bench("-p", String(PROMPTS[0]), "-n", String(DECODED));
    const [long] = bench("-p", String(PROMPTS[1]), "-n", "0");
    return {start, prefill: [short, long], decode, device};
}

async function speed(models) {
    const vocab = cmf("info", models[0]).arch.vocab_size;
    const engines = [
        ...models.map((model) => [`cmf-gpu, ${basename(model)}`, () => measureOurs(model, vocab)]),
        [`llama.cpp Vulkan, ${basename(gguf)}`, () => measurePeer("vulkan", vocab)],
        [`llama.cpp CPU, ${basename(gguf)}`, () => measurePeer(false, vocab)]
    ];
    const results = engines.map(() => []);
    const loads = [];
    for (let round = 0; round < ROUNDS; round++)
        for (const [i, [name, measure]] of engines.entries()) {
            loads.push(loadavg()[0]);
            results[i].push(await measure());
            process.stderr.write(`round ${round + 1}, ${name}: ${JSON.stringify(results[i].at(-1))}\n`);
        }
    console.log(`${cpus()[0].model}, ${cpus().length} cores; load before each measurement ${Math.min(...loads).toFixed(1)} to ` +
        `${Math.max(...loads).toFixed(1)}, median ${median(loads).toFixed(1)}; medians of ${ROUNDS}\n`);
    console.log(`| | device | start to first token, s | prefill ${PROMPTS[0]}, tok/s | prefill ${PROMPTS[1]}, tok/s | decode ${DECODED}, tok/s |`);
    console.log("|---|---|---:|---:|---:|---:|");
    for (const [i, [name]] of engines.entries()) {
        const of = (pick) => median(results[i].map(pick));
        const cells = [of((r) => r.start).toFixed(2), ...PROMPTS.map((_, p) => of((r) => r.prefill[p]).toFixed(1)), of((r) => r.decode).toFixed(2)];
        console.log(`| ${name} | ${results[i][0].device} | ${cells.join(" | ")} |`);
    }
}

// The windows of `cmf-gpu ppl`: every token but the first counts once, given all tokens of its window before it.
async function perplexity(sequence, tokens, window, stride) {
    let sum = 0, count = 0, counted = 1;
    for (let start = 0; ; start += stride) {
        const end = Math.min(start + window, tokens.length);
        await sequence.clearHistory();
        // Evaluate a few tokens at a time: the logits of a whole window with a large vocabulary exceed JavaScript's heap.
        for (let at = start; at < end; at += PIECE) {
            const input = tokens.slice(at, Math.min(at + PIECE, end)).map((token, i) => {
                const next = at + i + 1;
                if (next < counted || next >= end) return token;
                return [token, {generateNext: {logits: true}}];
            });
            for (const [i, output] of (await sequence.controlledEvaluate(input)).entries()) {
                if (!output?.next?.logits) continue;
                const {logits} = output.next;
                let best = -Infinity, weight = 0;
                for (const logit of logits.values()) best = Math.max(best, logit);
                for (const logit of logits.values()) weight += Math.exp(logit - best);
                sum += Math.log(weight) - (logits.get(tokens[at + i + 1]) - best);
                count++;
            }
        }
        counted = end;
        if (end === tokens.length) return {ppl: Math.exp(sum / count), tokens: count};
    }
}

async function quality(model, file) {
    const window = 512, stride = 256, device = process.env.CMF_GPU_DEVICE ?? "software";
    const text = readFileSync(file, "utf8");
    const tokens = cmf("tokenize", model, text).tokens;
    const ours = cmf("ppl", model, "--device", device, "-f", file, "--ctx", String(window), "--stride", String(stride));
    const prompt = tokens.slice(0, 64);
    const run = cmf("run", model, "--device", device, "--greedy", "-n", "48", "--prompt-tokens", prompt.join(","));
    const {model: peerModel, sequence} = await llama(false, window, 1); // One thread: llama.cpp's threads wait actively for each other, which is slow on a busy machine.
    const theirs = peerModel.tokenize(text);
    const bos = peerModel.tokens.shouldPrependBosToken ? [peerModel.tokens.bos] : [];
    const same = JSON.stringify([...bos, ...theirs]) === JSON.stringify(tokens);
    const peer = await perplexity(sequence, tokens, window, stride);
    await sequence.clearHistory();
    const {tokens: continued} = await firstTokens(sequence, prompt, run.tokens.length);
    const agreed = run.tokens.findIndex((token, i) => token !== continued[i]);
    console.log("| | perplexity | tokens counted |\n|---|---:|---:|");
    console.log(`| cmf-gpu, ${basename(model)} | ${ours.ppl.toFixed(4)} | ${ours.tokens} |`);
    console.log(`| llama.cpp CPU, ${basename(gguf)} | ${peer.ppl.toFixed(4)} | ${peer.tokens} |\n`);
    console.log(`difference ${(100 * (ours.ppl / peer.ppl - 1)).toFixed(3)} %; the tokens of the text are ${same ? "the same" : "DIFFERENT"}; ` +
        `${agreed < 0 ? "all" : `the first ${agreed}`} of ${run.tokens.length} greedy tokens agree`);
    console.log(`greedy continuation: ${JSON.stringify(run.text)}`);
    console.log(`llama.cpp:           ${JSON.stringify(peerModel.detokenize(continued))}`);
    process.exit(0);
}

if (task === "peer") await peer(rest[0] === "cpu" ? false : rest[0], Number(rest[1]));
else if (task === "speed") await speed(rest);
else if (task === "quality" && rest.length === 2) await quality(...rest);
else throw new Error("usage: speed GGUF CMF... | quality GGUF CMF TEXT");
