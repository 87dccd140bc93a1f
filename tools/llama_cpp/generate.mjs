// Runs llama.cpp on GGUF files: a JSON request on each line of standard input, and its JSON answer on a line of output.
//
//   {"model": "model.gguf", "runs": [{"text": "Once" or "tokens": [1, 2], "n": 64, "logits": true, "spell": false}]}
//
// Each run answers {"tokens", "text", "prompt", "logits"}: what greedy decoding wrote, the prompt's tokens, and, where
// asked for, the logits of all tokens after each token of the prompt. `spell` only cuts the text into tokens, and tells
// which of the first `ends` tokens end a text; with `special`, names of control tokens become the tokens. With
// `embed`, of an encoder, the answer is {"embedding"}: the pooled outputs of the text.
//
//   {"model": "model.gguf", "context": {"contextSize": 1024, "sequences": 1, "batchSize": 512}}
//
// answers the list of what llama.cpp logs while it makes this context, such as the sizes of its caches. What fails
// answers {"error"}.

import process from "node:process";
import readline from "node:readline";
import {getLlama} from "node-llama-cpp";

function promptOf(model, run) {
    if (run.tokens != null) return run.tokens;
    const first = model.tokens.shouldPrependBosToken ? [model.tokens.bos] : [];
    return [...first, ...model.tokenize(run.text, run.special ?? false)];
}

async function logitsOf(sequence, prompt) {
    const input = prompt.map((token) => [token, {generateNext: {logits: true, token: false}}]);
    const found = await sequence.controlledEvaluate(input);
    return found.map(({next}) => Array.from({length: next.logits.size}, (_, id) => next.logits.get(id)));
}

async function write(model, sequence, prompt, n) {
    const tokens = [];
    if (n === 0) return tokens;
    for await (const token of sequence.evaluate(prompt, {temperature: 0})) {
        if (model.isEogToken(token)) break;
        tokens.push(token);
        if (tokens.length === n) break;
    }
    return tokens;
}

async function embed(model, run) {
    const context = await model.createEmbeddingContext({contextSize: 256, threads: 1});
    const {vector} = await context.getEmbeddingFor(run.tokens ?? run.text);
    await context.dispose();
    return {embedding: Array.from(vector)};
}

async function answer(model, run) {
    if (run.embed) return await embed(model, run);
    const prompt = promptOf(model, run);
    if (run.spell) {
        const ends = Array.from({length: run.ends ?? 0}, (_, token) => token).filter((token) => model.isEogToken(token));
        return {prompt, tokens: [], text: "", logits: null, ends};
    }
    const context = await model.createContext({
        contextSize: prompt.length + run.n + 8,
        sequences: 1,
        threads: 1,
        flashAttention: false,
        experimentalKvCacheKeyType: "F32",
        experimentalKvCacheValueType: "F32"
    });
    const sequence = context.getSequence();
    const logits = run.logits ? await logitsOf(sequence, prompt) : null;
    await sequence.clearHistory();
    const tokens = await write(model, sequence, prompt, run.n ?? 64);
    await context.dispose();
    return {prompt, tokens, text: model.detokenize(tokens, false, prompt), logits};
}

async function logOf(llama, modelPath, options) {
    const lines = [];
    llama.logger = (level, message) => lines.push(message.trimEnd());
    llama.logLevel = "debug";
    const model = await llama.loadModel({modelPath});
    await (await model.createContext({threads: 1, ...options})).dispose();
    await model.dispose();
    llama.logLevel = "error";
    return lines;
}

async function answers(llama, {model: modelPath, runs, context}) {
    if (context != null) return await logOf(llama, modelPath, context);
    const model = await llama.loadModel({modelPath, useMmap: false});
    const found = [];
    for (const run of runs) found.push(await answer(model, run));
    await model.dispose();
    return found;
}

const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error", progressLogs: false});
for await (const line of readline.createInterface({input: process.stdin})) {
    const found = await answers(llama, JSON.parse(line)).catch((error) => ({error: String(error)}));
    process.stdout.write(JSON.stringify(found) + "\n");
}
process.exit(0);
