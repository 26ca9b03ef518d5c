/* Simulated gateways for benchmarks/fleet.py: one process, one epoll loop, N connections, no disk, no data plane.
 *
 *   fleet_swarm PORT SPEC INTERVAL_US    dial, register, answer every POLL until standard input ends
 *
 * A gateway keeps the promises of docs/formats/messages.md that the server relies on: a cut an interval, numbered without
 * holes; any cut can be asked for again and is then the same bytes (it follows from its number, so nothing is kept); at most
 * 28 cuts an answer and the newest one LIVE beside a longer backlog; CAPS and THRESHOLDS are acknowledged, not applied.
 * One connection is dialled a millisecond, as a fleet returns that spreads its dialling. One that the server closes dials again
 * after a random part of a second, as agents do: "redials" were turned away before their first POLL, "moved" had been polled
 * (their shard moved to another pair) and go on with the cuts they had.
 *
 * Standard input, a line each: "mark" forgets the lags measured so far, "freeze" ends the making of new cuts. Both are
 * answered with one line of JSON. SPEC is written by fleet_load.py, which names its parts in the same order.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { POLL = 18, IN_BYTES = 16384, EVENTS = 256, BACKLOG = 28, SENT_TIMES = 64, LAGS = 60000, CUM = 4 };

struct spec { /* u32 each; *_at are offsets of msgpack's big-endian uint 64, cuts_at of a small positive one */
    uint32_t n, groups, variants, rows, epoch, caps_kind, thresholds_kind, columns[CUM];
    uint32_t reply_len, poll_at, sent_at, wall_at, cuts_at, first_at, last_at;
    uint32_t none_len, none_poll_at, none_sent_at, none_wall_at;
    uint32_t caps_ack_len, caps_ack_at, thresholds_ack_len, thresholds_ack_at;
};

struct cut {
    uint32_t len, gw_at, seq_at, t_at, blob_at;
    unsigned char *bytes;
};

struct conn {
    int fd;                         /* 0: to be dialled at due_ms */
    uint32_t used, hello_len, due_ms;
    uint64_t sent, acked;           /* numbers of cuts: newest sent, newest durable */
    uint64_t first_us, first_wall;  /* monotonic and wall clock of the first POLL */
    uint32_t sent_ms[SENT_TIMES];   /* when the newest cuts left first */
    const unsigned char *gw, *ids, *hello;
    unsigned char in[IN_BYTES];
};

static struct spec spec;
static unsigned char *reply, *none, *caps_ack, *thresholds_ack;
static struct cut *cuts;  /* [group][variant] */
static int64_t *cycles;   /* [group][CUM][rows]: what all variants of a group add to the lifetime counters */
static struct conn *conns;
static uint64_t interval_us, polls, again, redials, moved, thresholds, caps, lag_count, unconnected;
static uint32_t lags[LAGS + 1];
static unsigned char out[(BACKLOG + 2) * 65536];
static int frozen;

static void fail(const char *what, long number) {
    fprintf(stderr, "fleet_swarm: %s (%ld): %s\n", what, number, strerror(errno));
    exit(1);
}

static uint64_t clock_us(clockid_t id) {
    struct timespec now;
    clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void put_u64(unsigned char *at, uint64_t value) {
    value = __builtin_bswap64(value);
    memcpy(at, &value, 8);
}

/* One non-negative msgpack integer; moves the cursor behind it. */
static uint64_t take_uint(const unsigned char **at) {
    unsigned char tag = *(*at)++;
    int bytes = tag >= 0xcc && tag <= 0xcf ? 1 << (tag - 0xcc) : 0;
    uint64_t value = bytes ? 0 : tag & 0x7f;
    while (bytes--) value = value << 8 | *(*at)++;
    return value;
}

static void skip_key(const unsigned char **at) { *at += 1 + (**at & 0x1f); }

static uint64_t newest(struct conn *conn, uint64_t now_us) {
    if (frozen) return conn->sent;
    return 1 + (now_us - conn->first_us + interval_us / 2) / interval_us;
}

/* Cut number seq of a gateway at ``to``; returns its length. */
static uint32_t make_cut(struct conn *conn, uint64_t seq, unsigned char *to) {
    uint64_t index = (uint64_t)(conn - conns), group = index % spec.groups, turn = seq + index / spec.groups;
    struct cut *cut = &cuts[group * spec.variants + turn % spec.variants];
    memcpy(to, cut->bytes, cut->len);
    memcpy(to + cut->gw_at, conn->gw, 16);
    put_u64(to + cut->seq_at, seq);
    put_u64(to + cut->t_at, conn->first_wall + (seq - 2) * interval_us);
    unsigned char *blob = to + cut->blob_at;
    memcpy(blob, conn->ids, 8 * spec.rows);
    for (int k = 0; k < CUM; k++) {
        unsigned char *column = blob + 8 * (size_t)spec.rows * spec.columns[k];
        const int64_t *cycle = cycles + (group * CUM + (uint64_t)k) * spec.rows;
        for (uint32_t row = 0; row < spec.rows; row++) {
            int64_t value;
            memcpy(&value, column + 8 * row, 8);
            value += cycle[row] * (int64_t)(turn / spec.variants);
            memcpy(column + 8 * row, &value, 8);
        }
    }
    return cut->len;
}

static void turned_away(struct conn *conn) {
    close(conn->fd);
    conn->fd = conn->used = 0;
    conn->due_ms = (uint32_t)(clock_us(CLOCK_MONOTONIC) / 1000) + 100 + (uint32_t)rand() % 900;
    conn->first_us ? moved++ : redials++;
    unconnected++;
}

static void send_all(struct conn *conn, const unsigned char *data, size_t size) {
    while (size) {
        ssize_t sent = send(conn->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR) return turned_away(conn);
        if (sent > 0) data += sent, size -= (size_t)sent;
    }
}

static void note_durable(struct conn *conn, uint64_t durable, uint32_t now_ms) {
    for (uint64_t seq = conn->acked + 1; seq <= durable && seq <= conn->sent; seq++) {
        if (conn->sent - seq >= SENT_TIMES) continue;
        uint32_t lag = now_ms - conn->sent_ms[seq % SENT_TIMES];
        lags[lag < LAGS ? lag : LAGS]++;
        lag_count++;
    }
    if (durable > conn->acked) conn->acked = durable;
}

static void answer_poll(struct conn *conn, const unsigned char *at) {
    uint64_t now_us = clock_us(CLOCK_MONOTONIC), wall_us = clock_us(CLOCK_REALTIME);
    polls++;
    if (!conn->first_us) conn->first_us = now_us, conn->first_wall = wall_us;
    at++; /* {"poll": n, "sent_ns": n, "ack": [[epoch, seq], ...], "from": [epoch, seq], "lease": bool} */
    skip_key(&at);
    uint64_t poll = take_uint(&at);
    skip_key(&at);
    uint64_t sent_ns = take_uint(&at);
    skip_key(&at);
    for (int acks = *at++ & 0x0f; acks; acks--) {
        at++;
        uint64_t epoch = take_uint(&at), seq = take_uint(&at);
        if (epoch == spec.epoch) note_durable(conn, seq, (uint32_t)(now_us / 1000));
    }
    skip_key(&at);
    uint64_t from = conn->sent + 1, last = newest(conn, now_us);
    if (*at++ & 0x0f) take_uint(&at), from = take_uint(&at);
    uint64_t count = from > last ? 0 : last - from + 1;
    if (count > BACKLOG) count = BACKLOG;
    size_t size = 0;
    for (uint64_t seq = from; seq < from + count; seq++) {
        if (seq <= conn->sent) again++;
        else conn->sent_ms[seq % SENT_TIMES] = (uint32_t)(now_us / 1000), conn->sent = seq;
        size += make_cut(conn, seq, out + size);
    }
    if ((count && from + count <= last) || from > last + 1) { /* behind all: the newest alone is wanted */
        uint32_t len = make_cut(conn, last, out + size);
        out[size + 7] |= 1; /* LIVE */
        size += len;
    }
    const unsigned char *closing = count ? reply : none;
    uint32_t len = count ? spec.reply_len : spec.none_len;
    memcpy(out + size, closing, len);
    put_u64(out + size + (count ? spec.poll_at : spec.none_poll_at), poll);
    put_u64(out + size + (count ? spec.sent_at : spec.none_sent_at), sent_ns);
    put_u64(out + size + (count ? spec.wall_at : spec.none_wall_at), wall_us);
    if (count) {
        out[size + spec.cuts_at] = (unsigned char)count;
        put_u64(out + size + spec.first_at, from);
        put_u64(out + size + spec.last_at, from + count - 1);
    }
    send_all(conn, out, size + len);
}

/* The number that CAPS (gen) and THRESHOLDS (version) begin with goes back. */
static void acknowledge(struct conn *conn, const unsigned char *at, unsigned char *ack, uint32_t len, uint32_t number_at) {
    at++;
    skip_key(&at);
    put_u64(ack + number_at, take_uint(&at));
    send_all(conn, ack, len);
}

static void obey(struct conn *conn, const unsigned char *frame) {
    if (frame[6] == POLL) answer_poll(conn, frame + 8);
    else if (frame[6] == spec.thresholds_kind) {
        thresholds++;
        acknowledge(conn, frame + 8, thresholds_ack, spec.thresholds_ack_len, spec.thresholds_ack_at);
    } else if (frame[6] == spec.caps_kind) {
        caps++;
        acknowledge(conn, frame + 8, caps_ack, spec.caps_ack_len, spec.caps_ack_at);
    }
}

static void readable(struct conn *conn) {
    ssize_t got = recv(conn->fd, conn->in + conn->used, IN_BYTES - conn->used, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return turned_away(conn);
    conn->used += (uint32_t)got;
    uint32_t at = 0, length;
    while (conn->fd && conn->used - at >= 8) {
        memcpy(&length, conn->in + at, 4);
        length += 4;
        if (length > IN_BYTES) fail("a frame is longer than the buffer, bytes", length);
        if (conn->used - at < length) break;
        obey(conn, conn->in + at);
        at += length;
    }
    if (!conn->fd) return;
    memmove(conn->in, conn->in + at, conn->used - at);
    conn->used -= at;
}

static void dial(struct conn *conn, int port, int epoll) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1;
    conn->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (conn->fd < 0) fail("no socket; see `ulimit -Hn`; gateway", conn - conns);
    if (connect(conn->fd, (struct sockaddr *)&address, sizeof address)) fail("connect, gateway", conn - conns);
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    epoll_ctl(epoll, EPOLL_CTL_ADD, conn->fd, &event);
    unconnected--;
    send_all(conn, conn->hello, conn->hello_len);
}

/* One of those that are due. */
static void dial_next(int port, int epoll) {
    static uint32_t next;
    uint32_t now_ms = (uint32_t)(clock_us(CLOCK_MONOTONIC) / 1000);
    for (uint32_t looked = 0; looked < spec.n; looked++, next++) {
        struct conn *conn = &conns[next % spec.n];
        if (!conn->fd && conn->due_ms <= now_ms) return dial(conn, port, epoll);
    }
}

static uint32_t lag_at(double share) {
    uint64_t below = 0;
    for (uint32_t lag = 0; lag <= LAGS; lag++)
        if ((below += lags[lag]) >= share * (double)lag_count) return lag;
    return 0;
}

static void report(void) {
    uint64_t total = 0, running = 0;
    for (uint32_t i = 0; i < spec.n; i++) total += conns[i].sent, running += conns[i].sent > 0;
    printf("{\"cuts\": %lu, \"running\": %lu, \"again\": %lu, \"redials\": %lu, \"moved\": %lu, \"polls\": %lu, \"thresholds\": %lu, \"caps\": %lu, "
           "\"lag_p50_ms\": %u, \"lag_p99_ms\": %u, \"lag_max_ms\": %u}\n",
           total, running, again, redials, moved, polls, thresholds, caps, lag_at(0.5), lag_at(0.99), lag_at(1.0));
    fflush(stdout);
}

/* Returns 0 at the end of standard input. */
static int command(void) {
    char line[64];
    ssize_t got = read(0, line, sizeof line - 1);
    if (got <= 0) return 0;
    line[got] = 0;
    if (strstr(line, "freeze")) frozen = 1;
    report();
    if (strstr(line, "mark")) memset(lags, 0, sizeof lags), lag_count = 0;
    return 1;
}

static unsigned char *load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path, 0);
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    unsigned char *data = malloc(size);
    if (!data || fread(data, 1, size, file) != size) fail(path, (long)size);
    fclose(file);
    return data;
}

static unsigned char *part(unsigned char **at, size_t size) {
    unsigned char *found = *at;
    *at += size;
    return found;
}

static void read_spec(unsigned char *at) {
    memcpy(&spec, part(&at, sizeof spec), sizeof spec);
    reply = part(&at, spec.reply_len);
    none = part(&at, spec.none_len);
    caps_ack = part(&at, spec.caps_ack_len);
    thresholds_ack = part(&at, spec.thresholds_ack_len);
    size_t cycle_bytes = 8 * (size_t)CUM * spec.rows, templates = (size_t)spec.groups * spec.variants;
    cycles = malloc(cycle_bytes * spec.groups);
    memcpy(cycles, part(&at, cycle_bytes * spec.groups), cycle_bytes * spec.groups);
    cuts = calloc(templates, sizeof *cuts);
    for (size_t i = 0; i < templates; i++) {
        memcpy(&cuts[i], part(&at, 20), 20);
        cuts[i].bytes = part(&at, cuts[i].len);
    }
    conns = calloc(spec.n, sizeof *conns);
    for (uint32_t i = 0; i < spec.n; i++) {
        memcpy(&conns[i].hello_len, part(&at, 4), 4);
        conns[i].gw = part(&at, 16);
        conns[i].ids = part(&at, 8 * (size_t)spec.rows);
        conns[i].hello = part(&at, conns[i].hello_len);
    }
}

int main(int argc, char **argv) {
    struct rlimit limit;
    if (argc != 4) return fprintf(stderr, "usage: fleet_swarm PORT SPEC INTERVAL_US\n"), 64;
    read_spec(load(argv[2]));
    interval_us = strtoull(argv[3], NULL, 10);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    int epoll = epoll_create1(0), port = atoi(argv[1]);
    struct epoll_event events[EVENTS], input = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &input);
    for (unconnected = spec.n;;) {
        int count = epoll_wait(epoll, events, EVENTS, unconnected ? 1 : -1);
        for (int i = 0; i < count; i++)
            if (events[i].data.ptr) readable(events[i].data.ptr);
            else if (!command()) return 0;
        if (unconnected) dial_next(port, epoll);
    }
}
