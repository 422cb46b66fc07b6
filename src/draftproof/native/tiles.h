/* Tiles (AMX), where the build has them. */
#pragma once
#include "lanes.h"

#ifdef __AMX_TILE__
#define TILES 1

/* The shapes of a thread's tiles. */
typedef struct {
    uint8_t palette, start, nothing[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* Forces the sources of tiles into memory: compilers do not know that tile loads read them. */
#define WRITTEN __asm__ volatile("" ::: "memory")

/* of a thread's tiles; 0 if it has none */
static _Thread_local int64_t tile_form;

/* Configures the thread's tiles, if they have another form. */
static inline void configured(const Tiles *tiles, int64_t form) {
    if (tile_form == form) return;
    tile_form = form;
    WRITTEN;
    _tile_loadconfig(tiles);
}

/* Configures all of the thread's tiles as 16 rows of 64 bytes. */
static inline void whole_tiles(void) {
    enum { WHOLE = -1 };
    Tiles tiles = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) tiles.bytes[tile] = 64, tiles.rows[tile] = 16;
    configured(&tiles, WHOLE);
}

/* Releases the thread's tiles. */
static inline void tiles_released(void) {
    _tile_release();
    tile_form = 0;
}

#else
#define TILES 0
#endif
