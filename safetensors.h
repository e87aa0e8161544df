/* safetensors.h: the tensors of a model directory, each a checked range of a file. The format: 8 bytes of header
 * length, a JSON header that gives every tensor's dtype, shape and data_offsets, then the data without gaps
 * (github.com/huggingface/safetensors). A model is one file or several with an index. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "base.h"

enum { MOST_DIMS = 8 };

typedef struct {
    char *name;
    const char *dtype; /* as the format spells it: "BF16", "U8", ... */
    int dims;
    int64_t shape[MOST_DIMS];
    int file;                  /* index into Tensors.file */
    size_t offset, size;       /* bytes from the beginning of the file, checked */
    const unsigned char *data; /* the same bytes, mapped */
} Tensor;

typedef struct {
    char *name;
    int fd;
    const unsigned char *map;
    size_t size;
} TensorFile;

typedef struct {
    Tensor *tensor; /* sorted by name */
    int n;
    TensorFile *file;
    int files;
} Tensors;

/* Opens model.safetensors, or the files that model.safetensors.index.json names, in `dir`; or `dir` itself if it is a
 * file. BAD_MODEL with file, tensor, expected and found. If one of the files of the Tensors opened last shrinks while
 * it is mapped, reading there ends the process with BAD_MODEL and a line that names it. */
bool tensors_open(Tensors *t, const char *dir, Error *e);
void tensors_close(Tensors *t);
const Tensor *tensors_find(const Tensors *t, const char *name); /* or NULL */

#endif
