/* blob.h: one file of a repository on its way into the hub's cache layout, which other tools share:
 *
 *   models--ORG--NAME/blobs/ID              a file's content; ID is its sha256, or its git hash if it is small
 *   models--ORG--NAME/snapshots/COMMIT/FILE a relative link to its blob
 *   models--ORG--NAME/refs/REVISION         the commit that a branch or tag was when it was fetched
 *   .locks/models--ORG--NAME/ID.lock        flock while the blob is fetched
 *
 * It hides segments, journal, hash and locks. Many files can be under way at once, all in one thread. */
#ifndef BLOB_H
#define BLOB_H

#include "hub.h"

#include <pthread.h>
#include <semaphore.h>

enum { MOST_CACHE = 2000, MOST_NAME = 1000, MOST_PATH = 4096 };

typedef struct { /* where files come from and where they go */
    Hub *hub;
    char name[100], commit[41];
    char cache[MOST_CACHE], folder[MOST_CACHE + 200],
        locks[MOST_CACHE + 200]; /* folder: models--ORG--NAME in the cache */
} Repository;

typedef struct { /* one file */
    char *name, id[65];
    uint64_t size, done; /* bytes; those that have arrived */
    enum { WAITING, OPEN, HERE } state;
    double retry; /* when another process had the lock: not before */

    /* of blob.c, while OPEN */
    int lock, fd;
    uint64_t *arrived; /* (segments) bytes of each; what the journal says */
    bool *busy;        /* (segments) a request is running */
    int requests;      /* that are */
    Request *stream;   /* the only request, of a server that takes no ranges */
    char *direct;      /* the content host's signed URL */
    bool spoiled;      /* its hash was wrong once */
    Hub *hub;

    pthread_t thread; /* hashes what lies before the frontier */
    sem_t more;       /* the frontier has moved, or stop */
    _Atomic uint64_t frontier;
    _Atomic bool stop, hashed;
    int problem;    /* once hashed: errno of reading or syncing, */
    char found[65]; /* the hash */
} File;

bool file_here(const Repository *r, const File *f);      /* is it complete? */
uint64_t file_begun(const Repository *r, const File *f); /* bytes on disk of one that is not, about */
bool file_link(const Repository *r, const File *f, Error *e);
/* Locks it and opens what there is of it: now it is OPEN, or HERE, or WAITING while another process fetches it. */
bool file_open(const Repository *r, File *f, Error *e);
bool file_request(const Repository *r, File *f);      /* starts one more request; false: there is nothing to ask for */
bool file_ended(File *f, const Request *q, Error *e); /* such a request has */
bool file_arrived(const File *f);                     /* all of it, and it is hashed */
/* Then: HERE under its name if the hash is right, WAITING to be fetched once more if it is not, an error the next time.
 */
bool file_finish(const Repository *r, File *f, Error *e);
void file_close(File *f); /* ends what runs for it; what has arrived stays on disk */

/* Fills in e from errno, with what cures it. */
bool disk_error(Error *e, const char *path);
/* Makes the folders of `path` up to its last slash. Those behind the first `trusted` bytes must not be links, which
 * would lead elsewhere. */
bool make_folders(const char *path, size_t trusted, Error *e);
/* A link with this text, in place of whatever was there. */
bool put_link(const char *text, const char *path, Error *e);

#endif
