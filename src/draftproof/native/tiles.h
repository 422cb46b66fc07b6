/* Tiles of numbers that some processors multiply at once (AMX). */
#pragma once
#include "model.h"

/* whether there are any, and the kernel of the system lets us have them */
extern int draftproof_tiles;

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) \
        && defined(__AVX512F__) && defined(__linux__)
#define TILES 1

/* What the tiles of a thread look like. */
typedef struct {
    uint8_t palette, start, nothing[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* What tiles are loaded from is in memory by now: compilers have not been told that loading reads
 * it. */
#define WRITTEN __asm__ volatile("" ::: "memory")
#else
#define TILES 0
#endif
