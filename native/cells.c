/* Cells: between an engine's buffers and pages, without the interpreter. */
#include "kvfs_native.h"

#include <string.h>

/* ``count`` cells of one head: ``to_page`` says in which direction. */
static void move(uint8_t *page, uint64_t cell, uint8_t *there, int64_t step, uint64_t nbytes, uint64_t count, int to_page) {
    if (cell == nbytes && step == (int64_t)nbytes) {
        nbytes *= count;
        count = 1;
    }
    for (; count; count--, page += cell, there += step) {
        if (to_page) memcpy(page, there, nbytes);
        else memcpy(there, page, nbytes);
    }
}

void kvfs_cells(
    const kvfs_shape *shape, const kvfs_layer *layers, uint64_t n_layers, const kvfs_page *pages, uint64_t n_pages,
    const int64_t *units, int to_page) {
    const kvfs_shape s = *shape;
    const uint64_t line = s.granule_states * s.cell, row = line * s.page_heads, granule_bytes = row * s.page_layers;
    for (const kvfs_page *p = pages; p < pages + n_pages; p++) {
        const uint64_t end = p->state + s.states;
        for (uint64_t state = p->state > s.first ? p->state : s.first; state < end;) {
            const uint64_t inside = state % s.unit_states, here = state - p->state, at = here % s.granule_states;
            uint64_t count = s.unit_states - inside;
            if (count > s.granule_states - at) count = s.granule_states - at;
            if (count > end - state) count = end - state;
            const int64_t unit = units[state / s.unit_states - s.first_unit];
            state += count;
            if (unit < 0) continue;
            uint8_t *granule = p->memory + here / s.granule_states * granule_bytes + s.page_at + at * s.cell;
            for (uint64_t i = 0; i < n_layers; i++) {
                uint8_t *page = granule + layers[i].row * row;
                uint8_t *there = layers[i].base + unit * s.unit_step + (int64_t)inside * s.state_step;
                for (uint64_t head = 0; head < s.heads; head++, page += line, there += s.head_step)
                    move(page, s.cell, there, s.state_step, s.nbytes, count, to_page);
            }
        }
    }
}
