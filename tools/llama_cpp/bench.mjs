// Times llama.cpp on a GGUF. The first line of standard input says on what:
//
//   {"model": "model.gguf", "prompt": [1, 2], "tokens": [3], "n": 8, "threads": 2, "flashAttention": true,
//    "batchSize": 512, "cacheType": "F16"}
//
// With `tokens`, the prompt is read once, and each further line times what n tokens after `tokens` take, each time after
// the same prompt. Without, each line times the prompt. The answer to a line is {"seconds", "logits"}: of one token or
// of the prompt, and the first logits.

import process from "node:process";
import readline from "node:readline";
import {getLlama} from "node-llama-cpp";

const LOGITS = 8;

async function makeContext(request, model) {
    const size = request.prompt.length + request.n + 8;
    const {threads, flashAttention, batchSize, cacheType} = request;
    const cache = {experimentalKvCacheKeyType: cacheType, experimentalKvCacheValueType: cacheType};
    return await model.createContext({contextSize: size, batchSize, sequences: 1, threads, flashAttention, ...cache});
}

async function firstLogits(sequence, tokens) {
    const input = [...tokens.slice(0, -1), [tokens.at(-1), {generateNext: {logits: true, token: false}}]];
    const logits = (await sequence.controlledEvaluate(input)).at(-1).next.logits;
    return Array.from({length: LOGITS}, (_, id) => logits.get(id));
}

async function back(sequence, length) {
    if (length === 0) await sequence.clearHistory();
    else if (sequence.nextTokenIndex > length)
        await sequence.eraseContextTokenRanges([{start: length, end: sequence.nextTokenIndex}]);
}

async function time(sequence, tokens, n) {
    const began = performance.now();
    let count = 0;
    for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        count += 1;
        if (count === n) break;
    }
    if (count !== n) throw new Error(`llama.cpp wrote ${count} tokens, not ${n}`);
    return (performance.now() - began) / 1000 / n;
}

const lines = readline.createInterface({input: process.stdin})[Symbol.asyncIterator]();
const request = JSON.parse((await lines.next()).value);
const llama = await getLlama({gpu: false, build: "never", maxThreads: request.threads, logLevel: "error", progressLogs: false});
const model = await llama.loadModel({modelPath: request.model});
const sequence = (await makeContext(request, model)).getSequence();
const kept = request.tokens == null ? 0 : request.prompt.length;
if (kept > 0) await sequence.evaluateWithoutGeneratingNewTokens(request.prompt);
const tokens = request.tokens ?? request.prompt;
const logits = await firstLogits(sequence, tokens);
while (!(await lines.next()).done) {
    await back(sequence, kept);
    const seconds = await time(sequence, tokens, request.tokens == null ? 1 : request.n);
    process.stdout.write(JSON.stringify({seconds, logits}) + "\n");
}
process.exit(0);
