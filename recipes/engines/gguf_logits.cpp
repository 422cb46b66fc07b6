// Logits that llama.cpp computes of a GGUF file:
//     gguf_logits FILE VOCABULARY TOKEN...
// writes float32 numbers to the standard output: those after each token, and if the file has layers
// for multi-token prediction, those that its first layer drafts with after the last token.
#include "llama-ext.h"
#include "llama.h"
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: gguf_logits FILE VOCABULARY TOKEN TOKEN...\n");
        return 2;
    }
    const int count = argc - 3, vocabulary = atoi(argv[2]);
    llama_backend_init();
    llama_model_params settings = llama_model_default_params();
    settings.load_mtp = true;
    llama_model * model = llama_model_load_from_file(argv[1], settings);
    if (model == nullptr) {
        return 1;
    }
    const int width = llama_model_n_embd(model), layers = llama_model_n_layer_nextn(model);

    llama_context_params options = llama_context_default_params();
    options.n_ctx = options.n_batch = options.n_ubatch = 128;
    options.n_threads = options.n_threads_batch = 1;
    options.type_k = options.type_v = GGML_TYPE_F32;
    options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, options);
    if (context == nullptr) {
        return 1;
    }
    llama_set_embeddings_nextn(context, layers > 0, false);
    llama_batch batch = llama_batch_init(count, 0, 1);
    for (int i = 0; i < count; i++) {
        batch.token[i] = atoi(argv[i + 3]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = count;
    if (llama_decode(context, batch) != 0) {
        return 1;
    }
    for (int i = 0; i < count; i++) {
        fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, stdout);
    }
    if (layers == 0) {
        return 0;
    }

    // each token is paired with the state of the one before it
    const float * states = llama_get_embeddings_nextn(context);
    std::vector<float> kept(states, states + (count - 1) * width);
    options.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    options.ctx_other = context;
    llama_context * drafter = llama_init_from_model(model, options);
    if (drafter == nullptr) {
        return 1;
    }
    llama_set_embeddings_nextn(drafter, true, true);
    llama_batch_ext * pairs = llama_batch_ext_init(drafter);
    for (int i = 1; i < count; i++) {
        const int place = llama_batch_ext_add_token(pairs, 0, atoi(argv[i + 3]));
        const llama_pos position[4] = {i, i, i, 0};
        llama_batch_ext_set_pos(pairs, place, position);
        llama_batch_ext_set_embd_token(pairs, place, {&kept[(i - 1) * width], 1, (size_t) width});
        llama_batch_ext_set_output_logits(pairs, place, true);
    }
    if (llama_process(drafter, LLAMA_PROCESS_TYPE_DECODE, pairs) != 0) {
        return 1;
    }
    fwrite(llama_get_logits_ith(drafter, count - 2), sizeof(float), vocabulary, stdout);
    return 0;
}
