/* Calls every function of the library with random inputs and writes what they return, so that the
 * library of another processor or system can be compared with that of this one.
 *
 *     exercise LIBRARY RESULTS
 *
 * `declared.h` is made of the library's sources (test_other_platforms.py): their structures, and
 * `library` with a pointer for each function. A result is a line with its name, its type and
 * its size, then its bytes. Ends with 1 if a row of a product depends on the rows next to it. */
#include <stdio.h>

#include "declared.h"

enum { ABSENT = -1, THREADS = 2 };

static FILE *results;
static uint64_t random_state = 1;
static int failures;

static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float uniform(void) { return (float)(random_bits() >> 8) * 0x1p-23f - 1.0f; }

static void *memory(int64_t bytes) {
    void *made = allocate_lines((size_t)bytes + 4096);
    if (!made) abort();
    memset(made, 0, (size_t)bytes + 4096);
    return made;
}

static bf16 *random_numbers(int64_t count, float scale) {
    bf16 *made = memory(count * 2);
    for (int64_t i = 0; i < count; i++) made[i] = narrow(uniform() * scale);
    return made;
}

static float *random_floats(int64_t count, float least, float most) {
    float *made = memory(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = least + (uniform() + 1) / 2 * (most - least);
    return made;
}

static int64_t *random_tokens(int64_t count, int64_t limit) {
    int64_t *made = memory(count * 8);
    for (int64_t i = 0; i < count; i++) made[i] = random_bits() % limit;
    return made;
}

static uint8_t *random_bytes(int64_t count) {
    uint8_t *made = memory(count);
    for (int64_t i = 0; i < count; i++) made[i] = (uint8_t)(random_bits() >> 8);
    return made;
}

static void put(const char *name, const char *type, const void *content, size_t bytes) {
    fprintf(results, "%s %s %d\n", name, type, (int)bytes);
    fwrite(content, 1, bytes, results);
}

#define PUT(name, type, content, count) \
    put(name, type, content, (size_t)(count) * sizeof *(content))

/* -- linear layers -- */

static int64_t padded_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

static Linear layer_of_16(int64_t size, int64_t outputs) {
    int64_t padded = padded_to(size, 32), strips = padded_to(outputs, 32);
    return (Linear){.weights = random_numbers(strips * padded, 0.2f), .size = size,
        .padded = padded, .outputs = outputs, .bias = random_numbers(strips, 0.5f)};
}

static Linear layer_of_8(int64_t size, int64_t outputs) {
    int64_t padded = padded_to(size, 64), strips = padded_to(outputs, 32);
    uint8_t *weights = random_bytes(strips * padded);
    for (int64_t i = 0; i < strips * padded; i++) weights[i] |= weights[i] == 0;
    return (Linear){.weights = weights, .size = size, .padded = padded, .outputs = outputs,
        .scale = random_floats(strips, 0.0005f, 0.002f)};
}

/* The block formats: their names, inputs and bytes of a block, and where scales begin and how many
 * bytes they have. */
static const struct {
    const char *name;
    int64_t inputs, bytes, scales, scale_bytes;
} blocks_of[] = {
    {"Q8_0", 32, 34, 0, 2}, {"Q4_0", 32, 18, 0, 2}, {"Q4_1", 32, 20, 0, 4}, {"Q5_0", 32, 22, 0, 2},
    {"Q5_1", 32, 24, 0, 4}, {"Q2_K", 256, 84, 80, 4}, {"Q3_K", 256, 110, 108, 2},
    {"Q4_K", 256, 144, 0, 4}, {"Q5_K", 256, 176, 0, 4}, {"Q6_K", 256, 210, 208, 2},
    {"IQ4_NL", 32, 18, 0, 2}, {"IQ4_XS", 256, 136, 0, 2}, {"MXFP4", 32, 17, 0, 1},
};
enum { FORMAT_COUNT = sizeof blocks_of / sizeof *blocks_of };

/* Random rows of blocks whose scales are ordinary numbers. */
static uint8_t *random_rows(int format, int64_t blocks) {
    uint8_t *rows = random_bytes(blocks * blocks_of[format].bytes);
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *scales = rows + b * blocks_of[format].bytes + blocks_of[format].scales;
        for (int64_t i = 1; i < blocks_of[format].scale_bytes; i += 2)
            scales[i] = (uint8_t)(0x14 + scales[i] % 8);
        if (blocks_of[format].scale_bytes == 1) *scales = (uint8_t)(118 + *scales % 6);
    }
    return rows;
}

static Linear layer_of_blocks(int format, int64_t size, int64_t outputs) {
    int64_t blocks = size / blocks_of[format].inputs, strips = padded_to(outputs, 32);
    uint8_t *records = memory(strips * blocks * blocks_of[format].bytes);
    library.pack(format + 1, random_rows(format, outputs * blocks), outputs, blocks, records,
            THREADS);
    return (Linear){.weights = records, .size = size, .padded = size, .outputs = outputs,
        .format = format + 1};
}

/* Products with so many rows, all of them together and each alone. */
static void products(const char *name, const Linear *layer) {
    static const int64_t counts[] = {1, 2, 3, 5, 7, 8, 12, 13, 31};
    bf16 *inputs = random_numbers(40 * layer->size, 2);
    memset(inputs + layer->size, 0, (size_t)layer->size * 2);
    bf16 *alone = memory(layer->outputs * 2), *together = memory(40 * layer->outputs * 2);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        library.linear(layer, inputs, together, counts[c], THREADS);
        for (int64_t r = 0; r < counts[c]; r++) {
            library.linear(layer, inputs + r * layer->size, alone, 1, 1);
            if (!memcmp(alone, together + r * layer->outputs, (size_t)layer->outputs * 2)) continue;
            fprintf(stderr, "%s: row %d of %d differs\n", name, (int)r, (int)counts[c]);
            failures++;
        }
    }
    PUT(name, "bf16", together, 31 * layer->outputs);
}

static void exercise_layers(void) {
    Linear parts[3] = {layer_of_16(100, 70), layer_of_8(100, 33), layer_of_16(100, 32)};
    Linear joint = {.size = 100, .outputs = 135, .count = 3, .parts = parts};
    Linear wide_16 = layer_of_16(1056, 65), wide_8 = layer_of_8(1056, 65);
    products("linear/16", &wide_16), products("linear/8", &wide_8);
    products("linear/joint", &joint);
    for (int f = 0; f < FORMAT_COUNT; f++) {
        char name[64];
        snprintf(name, sizeof name, "blocks/%s", blocks_of[f].name);
        Linear layer = layer_of_blocks(f, blocks_of[f].inputs == 32 ? 352 : 768, 70);
        products(name, &layer);
        int64_t *numbers = random_tokens(20, 70);
        float *rows = memory(20 * layer.size * 4);
        library.block_rows(&layer, numbers, 20, rows, THREADS);
        snprintf(name, sizeof name, "block_rows/%s", blocks_of[f].name);
        PUT(name, "float", rows, 20 * layer.size);
        Embeddings table = {random_rows(f, 9 * 3), 9, 3 * blocks_of[f].inputs, f + 1};
        int64_t tokens[] = {8, 0, 5, 100};
        bf16 *embedded = memory(4 * table.size * 2);
        library.embed(&table, tokens, 4, embedded);
        snprintf(name, sizeof name, "embed/%s", blocks_of[f].name);
        PUT(name, "bf16", embedded, 4 * table.size);
    }
    static const int64_t bytes[] = {34 * 16, 22 * 16, 144 * 2, 210 * 2};
    for (int64_t f = 0; f < 4; f++) {
        char name[64];
        snprintf(name, sizeof name, "quantize/%d", (int)f);
        uint8_t *made = memory(5 * bytes[f]);
        library.quantize(f, random_floats(5 * 512, -1, 1), 5, 512, made, THREADS);
        PUT(name, "bytes", made, 5 * bytes[f]);
        snprintf(name, sizeof name, "quantize_bf16/%d", (int)f);
        library.quantize_bf16(f, random_numbers(5 * 512, 1), 5, 512, made, THREADS);
        PUT(name, "bytes", made, 5 * bytes[f]);
    }
    /* of less than a page, which would be dropped; what follows has the same numbers as before */
    uint64_t before = random_state;
    enum { ROWS = 40, BLOCKS = 2 };
    int64_t taken = 0, nbytes = BLOCKS * blocks_of[0].bytes;
    Packing matrices[2];
    for (int m = 0; m < 2; m++)
        matrices[m] = (Packing){.rows = random_rows(0, ROWS * BLOCKS), .format = 1,
            .records = memory(padded_to(ROWS, 32) * nbytes), .outputs = ROWS, .blocks = BLOCKS};
    library.pack_matrices(matrices, 2, &taken);
    for (int m = 0; m < 2; m++)
        PUT("pack_matrices", "bytes", matrices[m].records, padded_to(ROWS, 32) * nbytes);
    random_state = before;
}

/* -- a model -- */

enum { SIZE = 64, HEADS = 4, KEY_HEADS = 2, HEAD = 32, GATES = 96, VOCAB = 200, CAPACITY = 64,
    LAYERS = 2, ROOM = 1 << 20 };

static Model model_of(Layer *layers, Linear *head) {
    for (int n = 0; n < LAYERS; n++)
        layers[n] = (Layer){.inner = layer_of_16(SIZE, (HEADS + 2 * KEY_HEADS) * HEAD),
            .output = layer_of_16(HEADS * HEAD, SIZE), .gate_up = layer_of_8(SIZE, 2 * GATES),
            .down = layer_of_8(GATES, SIZE), .before = random_floats(SIZE, 0.5f, 1.5f),
            .after = random_floats(SIZE, 0.5f, 1.5f), .query = random_floats(HEAD, 0.5f, 1.5f),
            .key = random_floats(HEAD, 0.5f, 1.5f), .kind = n};
    *head = layer_of_16(SIZE, VOCAB);
    return (Model){.layers = layers, .count = LAYERS, .last = random_floats(SIZE, 0.5f, 1.5f),
        .table = {random_numbers(VOCAB * SIZE, 1), VOCAB, SIZE, 0}, .head = head,
        .norm = {1e-6f, 1}, .loud = 1};
}

/* Keys and values of a committed text: in 16 bits, or in 8 with scales. */
static void **stores_of(int64_t rows, int small) {
    int64_t slots = rows * KEY_HEADS * CAPACITY;
    void **stores = memory(LAYERS * 4 * (int64_t)sizeof(void *)), **next = stores;
    for (int n = 0; n < LAYERS; n++) {
        for (int i = 0; i < 2; i++)
            *next++ = small ? (void *)random_bytes(slots * HEAD)
                    : (void *)random_numbers(slots * HEAD, 1);
        for (int i = 0; small && i < 2; i++) {
            bf16 *scales = *next++ = random_numbers(slots, 0.01f);
            for (int64_t s = 0; s < slots; s++) scales[s] &= 0x7fff;
        }
    }
    return stores;
}

static void exercise_model(int small) {
    Layer layers[LAYERS];
    Linear head;
    Model model = model_of(layers, &head);
    model.gelu = small;
    const bf16 *cosines = random_numbers(CAPACITY * HEAD, 1);
    const bf16 *sines = random_numbers(CAPACITY * HEAD, 1);
    AttentionKind kinds[LAYERS] = {{0, HEAD, cosines, sines}, {9, HEAD / 2, cosines, sines}};
    int64_t lengths[] = {37, 3}, parents[] = {-1, 0, 0, 2, 1, -1, 0, 1, 2, 3};
    Read read = {.rows = 2, .nodes = 5, .heads = HEADS, .key_heads = KEY_HEADS, .head_dim = HEAD,
        .capacity = CAPACITY, .context = CAPACITY, .threads = THREADS, .stores = small ? 4 : 2,
        .lengths = lengths, .parents = parents, .attention_kinds = kinds, .scale = 0.17f};
    void **stores = stores_of(2, small);
    int64_t *tokens = random_tokens(10, VOCAB);
    bf16 *last = memory(10 * SIZE * 2), *logits = memory(10 * VOCAB * 2), *work = memory(ROOM);
    library.forward(&read, &model, stores, tokens, last, logits, NULL, work);
    PUT(small ? "forward/8" : "forward/16", "about", last, 10 * SIZE);
    PUT(small ? "logits/8" : "logits/16", "about", logits, 10 * VOCAB);

    AttentionKind unrotated = {0, 0, cosines, sines};
    Read rotated = read;
    rotated.attention_kinds = &unrotated;
    int64_t slots = 2 * KEY_HEADS * CAPACITY * HEAD;
    bf16 *keys = random_numbers(slots, 1), *values = random_numbers(slots, 1);
    bf16 *inner = random_numbers(10 * (HEADS + 2 * KEY_HEADS) * HEAD, 1);
    bf16 *attended = memory(10 * HEADS * HEAD * 2);
    library.attend(&rotated, inner, keys, values, attended);
    PUT(small ? "attend/8" : "attend/16", "about", attended, 10 * HEADS * HEAD);

    int64_t *text = random_tokens(2 * CAPACITY, VOCAB), positions[] = {39, 4}, turns[10], reads[2];
    int64_t chains[10];
    float heats[] = {1, 0.5f}, trusts[] = {1, 1};
    int64_t longest = library.chain(&read, &model, stores, text, CAPACITY, positions, lengths, 3, 4,
            6, NULL, NULL, heats, trusts, -100, ABSENT, chains, turns, reads, work);
    PUT(small ? "chain/8" : "chain/16", "integers", chains, 10);
    PUT(small ? "turns/8" : "turns/16", "integers", turns, 10);
    PUT(small ? "longest/8" : "longest/16", "integers", &longest, 1);
}

/* -- sampling and drafting -- */

enum { WORDS_OF_TEXT = 1003 };

static void exercise_sampling(void) {
    int64_t positions[] = {5, 6, 7, 0, 1, 1 << 20}, tokens[36];
    int32_t keys[] = {12345, -777, 1 << 30, 3}, drawn[12];
    library.streams(keys, 1, positions, NULL, drawn, 2, 3);
    PUT("streams", "bytes", drawn, 12);
    float *noise = memory(6 * WORDS_OF_TEXT * 4), probs[24];
    library.gumbel(drawn, noise, 6, WORDS_OF_TEXT, THREADS);
    PUT("gumbel", "float", noise, 6 * WORDS_OF_TEXT);
    bf16 *logits = random_numbers(6 * WORDS_OF_TEXT, 8);
    logits[WORDS_OF_TEXT + 17] = 0x7fc0;                /* a row with NaN */
    for (int i = 0; i < WORDS_OF_TEXT; i++) logits[2 * WORDS_OF_TEXT + i] = 0xff80;
    int64_t places[] = {0, 1, 2, 3, 4, 5};
    float heats[] = {1, 0.7f, 1, 2, 1, 0.1f}, trusts[] = {1, 0.5f, 1, 2, 1, 1};
    library.sample(logits, noise, places, heats, 1, 6, WORDS_OF_TEXT, -7, tokens, THREADS);
    PUT("sample/noise", "integers", tokens, 6);
    library.sample(logits, NULL, NULL, heats, 2, 6, WORDS_OF_TEXT, -7, tokens, THREADS);
    PUT("sample/best", "integers", tokens, 6);
    float best[30];
    library.top_tokens(logits, 6, WORDS_OF_TEXT, 5, tokens, best, THREADS);
    PUT("top_tokens", "integers", tokens, 30), PUT("top_tokens/logits", "float", best, 30);
    library.best_tokens(logits, noise, places, heats, trusts, 6, WORDS_OF_TEXT, 4, probs, tokens,
            THREADS);
    PUT("best_tokens", "integers", tokens, 24), PUT("best_tokens/probs", "near", probs, 24);
    int64_t tree[] = {3, 4, 5, 4, 9, 1}, parents[] = {-1, 0, 0, 1, 3, 2};
    int64_t picks[] = {4, 4, 0, 9, 2, 2};
    int64_t path[4], counts[4], good = library.well_formed(tree, parents, 1, 6, 3, 10, ABSENT);
    library.accept(tree, parents, picks, 1, 6, 4, ABSENT, path, counts);
    PUT("well_formed", "integers", &good, 1);
    PUT("accept", "integers", path, 4), PUT("accept/counts", "integers", counts, 4);
    char *store = (char *)random_bytes(2 * 2 * 16 * 8);
    int64_t heads[] = {2}, slot[] = {8}, lengths[] = {3, 5}, nodes[] = {0, 2, 3, 1, 2, 4};
    library.keep(&store, heads, slot, 1, 16, 2, lengths, nodes, 3);
    PUT("keep", "bytes", store, 2 * 2 * 16 * 8);
}

/* Trees of two rows of up to 8 nodes. */
static TreeOutput tree_of(void) {
    return (TreeOutput){memory(2 * ROOM), memory(2 * ROOM), memory(2 * ROOM), 8, ABSENT, 1, 2};
}

static void put_tree(const char *name, const TreeOutput *tree, int64_t nodes) {
    char line[64];
    PUT(name, "integers", tree->tokens, 2 * nodes);
    snprintf(line, sizeof line, "%s/parents", name);
    PUT(line, "integers", tree->parents, 2 * nodes);
    snprintf(line, sizeof line, "%s/probs", name);
    PUT(line, "near", tree->probs, 2 * nodes);
}

static void exercise_heads(void) {
    Linear blocks[3], projection = layer_of_8(SIZE, VOCAB);
    for (int h = 0; h < 3; h++) blocks[h] = layer_of_16(SIZE, SIZE);
    bf16 *logits = memory(2 * 3 * VOCAB * 2), *work = memory(ROOM);
    library.heads(blocks, &projection, NULL, random_numbers(2 * SIZE, 1), logits, work, 2, 3, 1,
            VOCAB, THREADS);
    PUT("heads", "about", logits, 2 * 3 * VOCAB);
    bf16 *residuals = random_numbers(3 * SIZE, 1);
    library.residual(blocks, residuals, work, 3, THREADS);
    PUT("residual", "about", residuals, 3 * SIZE);
    logits = random_numbers(2 * 3 * VOCAB, 4);
    int32_t starts[VOCAB + 1], named[4 * VOCAB];
    for (int i = 0; i <= VOCAB; i++) starts[i] = 4 * i;
    for (int i = 0; i < 4 * VOCAB; i++) named[i] = (i * 7) % VOCAB;
    Pairs pairs = {starts, named, random_floats(4 * VOCAB, 0, 2), random_floats(VOCAB, -0.5f, 0),
        VOCAB, 4 * VOCAB};
    int64_t roots[] = {5, 77};
    float heats[] = {1, 0.5f}, trusts[] = {1, 0.8f};
    TreeOutput tree = tree_of();
    library.bigram_tree(&pairs, 0.5f, NULL, logits, roots, 2, 3, VOCAB, 4, NULL, NULL, heats,
            trusts, &tree, (float *)work, THREADS);
    put_tree("bigram_tree", &tree, 8);
    Linear block = layer_of_16(2 * SIZE, 2 * SIZE);
    Recurrence head = {.fed = layer_of_16(SIZE, SIZE), .back = layer_of_16(SIZE, SIZE),
        .projection = layer_of_16(2 * SIZE, VOCAB), .blocks = &block,
        .table = {random_numbers(VOCAB * SIZE, 1), VOCAB, SIZE, 0}, .hidden = SIZE, .layers = 1,
        .smooth = 1};
    tree = tree_of(), tree.nodes = 64;
    int64_t size = library.beam_search(&head, random_numbers(2 * SIZE, 1), roots, 2, 3, 3, NULL,
            NULL, heats, trusts, -1000, &tree, work, THREADS);
    PUT("beam_search/size", "integers", &size, 1);
    PUT("beam_search", "integers", tree.tokens, size);
    PUT("beam_search/second", "integers", tree.tokens + tree.nodes, size);
    PUT("beam_search/probs", "near", tree.probs, size);
}

static void exercise_lookup(void) {
    int64_t positions[] = {49, 20}, ends[] = {4, 40}, counts[] = {20, 9}, begins[] = {4, 40};
    int64_t owners[] = {7, (int64_t)3 << 33};
    Texts texts = {random_tokens(100, 5), positions, 2, 50};
    TreeOutput tree = tree_of();
    PromptSearch prompt = {4, 1, 8, 2};
    library.match_prompt(&prompt, &texts, 4, &tree);
    put_tree("match_prompt", &tree, 8);
    enum { SLOTS = 64, WAYS = 4, TEXT = 80 };
    int64_t sizes[] = {2, 4}, *tails = random_tokens(32, 5);
    Index index = {.text = random_tokens(TEXT, 5), .places = memory(SLOTS * WAYS * 8),
        .owners = memory(TEXT * 8), .tags = memory(SLOTS * WAYS * 4),
        .counts = memory(SLOTS * WAYS * 4),
        .weights = (const int32_t *)random_bytes(2 * 2 * 16 * 4), .sizes = sizes, .room = TEXT,
        .count = 2, .ways = WAYS, .slots = SLOTS, .shift = 20, .follow = 0x2545F491,
        .scatter = 0x1E3779B9, .absent = ABSENT};
    library.learn_text(&index, tails, ends, owners, texts.tokens, counts, 2, 20);
    PUT("learn_text", "integers", index.places, SLOTS * WAYS);
    PUT("learn_text/tags", "bytes", index.tags, SLOTS * WAYS);
    tree = tree_of();
    IndexSearch continued = {&index, tails, begins, ends, owners, 0.5f, 3, 2};
    library.continue_text(&continued, &texts, 3, &tree);
    put_tree("continue_text", &tree, 8);
    Table table = {.tags = memory(2 * SLOTS * 4), .tokens = memory(2 * SLOTS * 3 * 4),
        .owners = memory(2 * SLOTS * 8),
        .probs = memory(2 * SLOTS * 3 * 4), .best = 3, .slots = SLOTS, .shift = 20,
        .token = 0x2545F491, .before = 0x1E3779B9, .absent = ABSENT};
    int64_t parents[100], last[] = {1, 2};
    for (int i = 0; i < 100; i++) parents[i] = i % 50 - 1;
    int64_t *next = random_tokens(300, 5);
    library.recycle(&table, last, owners, 2, texts.tokens, parents, next, random_floats(300, 0, 3),
            50, 3, texts.tokens, counts, 50);
    PUT("recycle", "bytes", table.tags, 2 * SLOTS);
    PUT("recycle/last", "integers", last, 2);
    tree = tree_of();
    TableSearch likely = {&table, last, owners, 2, 2, 3, 2};
    library.likely_successors(&likely, &texts, 3, &tree);
    put_tree("likely_successors", &tree, 8);
    tree = tree_of();
    float *probs = random_floats(40, 0, 1), *judged = random_floats(10, 0, 4);
    int64_t *pool = random_tokens(40, 5), *kinds = random_tokens(40, 4), above[40];
    for (int i = 0; i < 40; i++) above[i] = i % 20 ? random_bits() % (i % 20) : -1;
    library.likeliest(pool, above, probs, 2, 20, &tree);
    put_tree("likeliest", &tree, 8);
    Member members[] = {{pool, above, probs, 10, 2}, {pool + 20, above + 20, NULL, 10, 2},
        {.rows = 2, .prompt = &prompt}, {.rows = 2, .index = &continued},
        {.rows = 2, .table = &likely}};
    int64_t pools[64], places[64], classes[64];
    tree = tree_of();
    library.merge_trees(judged, 1, 2, 0.3f, 0.9f, pool, above, kinds, positions, 20, members, 5,
            &texts, 3, 32, pools, places, classes, &tree);
    PUT("merge_trees/judged", "near", judged, 10);
    put_tree("merge_trees", &tree, 8);
}

static void exercise_states(void) {
    enum { ROWS = 2, TOKENS = 3, GROUPS = 2, HEADS = 4, INNER = 10, DEPTH = 36 };
    int64_t keys = ROWS * TOKENS * GROUPS * INNER, gates = ROWS * TOKENS * HEADS,
            states = ROWS * HEADS * INNER * DEPTH;
    float *after = memory(states * 4), *out = memory(gates * DEPTH * 4),
          *decay = memory(gates * 4), *rate = memory(gates * 4);
    /* one after another: the order of arguments depends on the compiler */
    bf16 *times = random_numbers(gates, 4), *shares = random_numbers(gates, 4);
    float *falls = random_floats(HEADS, -1, 1), *biases = random_floats(HEADS, -1, 1);
    library.delta_gates(times, shares, falls, biases, decay, rate, ROWS * TOKENS, HEADS);
    PUT("delta_gates", "near", decay, gates);
    float *query = random_floats(keys, -1, 1), *key = random_floats(keys, -1, 1);
    float *value = random_floats(gates * DEPTH, -1, 1), *before = random_floats(states, -1, 1);
    library.delta_rule(query, key, value, decay, rate, before, after, out, NULL, ROWS, TOKENS,
            GROUPS, HEADS, INNER, DEPTH, 2);
    PUT("delta_rule", "near", out, gates * DEPTH);
    PUT("delta_rule/after", "near", after, states);
    int64_t parents[] = {-1, 0, 0, -1, 0, 1};
    library.delta_rule(query, key, value, decay, rate, before, after, out, parents, ROWS, TOKENS,
            GROUPS, HEADS, INNER, DEPTH, 2);
    PUT("delta_rule/tree", "near", out, gates * DEPTH);
    bf16 *mixed = memory(ROWS * 20 * 7 * 2), *inputs = random_numbers(ROWS * 20 * 7, 1);
    bf16 *taps = random_numbers(20 * 4, 1), *bias = random_numbers(20, 1);
    library.causal_conv(inputs, taps, bias, mixed, NULL, ROWS, 20, 7, 4, 3, 1, 2);
    PUT("causal_conv", "bf16", mixed, ROWS * 20 * 7);
    library.causal_conv(inputs, taps, bias, mixed, parents, ROWS, 20, 7, 4, 3, 1, 2);
    PUT("causal_conv/tree", "bf16", mixed, ROWS * 20 * 7);
}

int main(int count, char **arguments) {
    if (count != 3 || !load_library(arguments[1])) {
        fprintf(stderr, "exercise: cannot load the library\n");
        return 2;
    }
    if (!library.usable()) return 3;                    /* this processor cannot run it */
    results = fopen(arguments[2], "wb");
    if (!results) return 2;
    exercise_layers(), exercise_model(0), exercise_model(1), exercise_sampling(), exercise_heads(),
            exercise_lookup(), exercise_states();
    fclose(results);
    return failures > 0;
}
