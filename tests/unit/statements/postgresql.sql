-- claim what is due

WITH
before AS MATERIALIZED
  (SELECT id, available_at, locked_by
   FROM
     (SELECT *, sum(size) OVER (PARTITION BY queue
                                ORDER BY available_at, id ROWS UNBOUNDED PRECEDING) - size AS
      before
      FROM
        (SELECT chosen.*, b.most_bytes
         FROM unnest(%s::text[], %s::int[], %s::float8[], %s::int[]) b (queue,
                                                                        n, age, most_bytes), LATERAL
           (SELECT id, available_at, locked_by, queue, octet_length(payload) AS size
            FROM "outbox_event"
            WHERE (queue, available_at) >= (b.queue, statement_timestamp() - b.age * interval '1 second')
              AND (queue, available_at) <= (b.queue, statement_timestamp())
              AND available_at IS NOT NULL
              AND (rescues = 0
                   OR (rescues = 1
                       AND (locked_by IS NULL
                            OR locked_by = %s)))
            ORDER BY queue, available_at, id
            LIMIT b.n
            FOR UPDATE SKIP LOCKED) chosen) locked) sized
   WHERE
     before < most_bytes)
UPDATE "outbox_event" e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = statement_timestamp(),
                          available_at = statement_timestamp() + %s * interval '1 second'
FROM
before,
  (SELECT set_config('synchronous_commit', 'off', true)) unflushed
WHERE e.id = before.id RETURNING e.id, e.attempts, e.rescues, e.listener, e.routes, e.queue, e.history,
                                 e.occurred_at AT TIME ZONE 'UTC', e.created_at AT TIME ZONE 'UTC', e.deliver_at AT TIME ZONE 'UTC', e.first_due_at AT TIME ZONE 'UTC', e.event_id,
                                                                                                                                                                        e.event_type,
                                                                                                                                                                        e.aggregate_type,
                                                                                                                                                                        e.aggregate_id,
                                                                                                                                                                        e.tenant_id,
                                                                                                                                                                        e.payload,
                                                                                                                                                                        e.headers,
                                                                                                                                                                        e.unique_key,
                                                                                                                                                                        e.key,
                                                                                                                                                                        e.stream,
                                                                                                                                                                        before.available_at AT TIME ZONE 'UTC', before.locked_by,
                                                                                                                                                                                                                e.locked_at AT TIME ZONE 'UTC';

-- claim what is due at a time

WITH
before AS MATERIALIZED
  (SELECT id, available_at, locked_by
   FROM
     (SELECT *, sum(size) OVER (PARTITION BY queue
                                ORDER BY available_at, id ROWS UNBOUNDED PRECEDING) - size AS
      before
      FROM
        (SELECT chosen.*, b.most_bytes
         FROM unnest(%s::text[], %s::int[], %s::float8[], %s::int[]) b (queue,
                                                                        n, age, most_bytes), LATERAL
           (SELECT id, available_at, locked_by, queue, octet_length(payload) AS size
            FROM "outbox_event"
            WHERE (queue, available_at) >= (b.queue, statement_timestamp() - b.age * interval '1 second')
              AND (queue, available_at) <= (b.queue, %s)
              AND available_at IS NOT NULL
              AND (rescues = 0
                   OR (rescues = 1
                       AND (locked_by IS NULL
                            OR locked_by = %s)))
            ORDER BY queue, available_at, id
            LIMIT b.n
            FOR UPDATE SKIP LOCKED) chosen) locked) sized
   WHERE
     before < most_bytes)
UPDATE "outbox_event" e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = statement_timestamp(),
                          available_at = statement_timestamp() + %s * interval '1 second'
FROM
before,
  (SELECT set_config('synchronous_commit', 'off', true)) unflushed
WHERE e.id = before.id RETURNING e.id, e.attempts, e.rescues, e.listener, e.routes, e.queue, e.history,
                                 e.occurred_at AT TIME ZONE 'UTC', e.created_at AT TIME ZONE 'UTC', e.deliver_at AT TIME ZONE 'UTC', e.first_due_at AT TIME ZONE 'UTC', e.event_id,
                                                                                                                                                                        e.event_type,
                                                                                                                                                                        e.aggregate_type,
                                                                                                                                                                        e.aggregate_id,
                                                                                                                                                                        e.tenant_id,
                                                                                                                                                                        e.payload,
                                                                                                                                                                        e.headers,
                                                                                                                                                                        e.unique_key,
                                                                                                                                                                        e.key,
                                                                                                                                                                        e.stream,
                                                                                                                                                                        before.available_at AT TIME ZONE 'UTC', before.locked_by,
                                                                                                                                                                                                                e.locked_at AT TIME ZONE 'UTC';

-- claim by id

WITH
before AS MATERIALIZED
  (SELECT id, available_at, locked_by
   FROM "outbox_event"
   WHERE available_at <= statement_timestamp()
     AND id = ANY(%s)
     AND created_at <= statement_timestamp() + %s * interval '1 second'
     AND NOT (id = ANY(%s))
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY available_at, id
   FOR UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = statement_timestamp(),
                          available_at = statement_timestamp() + %s * interval '1 second'
FROM
before,
  (SELECT set_config('synchronous_commit', 'off', true)) unflushed
WHERE e.id = before.id RETURNING e.id, e.attempts, e.rescues, e.listener, e.routes, e.queue, e.history,
                                 e.occurred_at AT TIME ZONE 'UTC', e.created_at AT TIME ZONE 'UTC', e.deliver_at AT TIME ZONE 'UTC', e.first_due_at AT TIME ZONE 'UTC', before.available_at AT TIME ZONE 'UTC', before.locked_by,
                                                                                                                                                                                                                e.locked_at AT TIME ZONE 'UTC';

-- claim streams

WITH
before AS MATERIALIZED
  (SELECT chosen.*, b.most_bytes
   FROM unnest(%s::text[], %s::int[], %s::float8[], %s::int[]) b (queue,
                                                                  n, age, most_bytes), LATERAL
     (SELECT stream, due_at, locked_by
      FROM "outbox_stream"
      WHERE (queue, due_at) >= (b.queue, statement_timestamp() - b.age * interval '1 second')
        AND (queue, due_at) <= (b.queue, statement_timestamp())
        AND due_at IS NOT NULL
        AND (rescues = 0
             OR (rescues = 1
                 AND (locked_by IS NULL
                      OR locked_by = %s)))
      ORDER BY queue, due_at
      LIMIT b.n
      FOR UPDATE SKIP LOCKED) chosen)
UPDATE "outbox_stream" e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = statement_timestamp(),
                          due_at = statement_timestamp() + %s * interval '1 second'
FROM
before,
  (SELECT set_config('synchronous_commit', 'off', true)) unflushed
WHERE e.stream = before.stream RETURNING e.stream, e.queue, e.rescues, before.due_at AT TIME ZONE 'UTC', before.locked_by,
                                                                                                         e.locked_at AT TIME ZONE 'UTC';

-- claim streams, some excluded

WITH
before AS MATERIALIZED
  (SELECT chosen.*, b.most_bytes
   FROM unnest(%s::text[], %s::int[], %s::float8[], %s::int[]) b (queue,
                                                                  n, age, most_bytes), LATERAL
     (SELECT stream, due_at, locked_by
      FROM "outbox_stream"
      WHERE (queue, due_at) >= (b.queue, statement_timestamp() - b.age * interval '1 second')
        AND (queue, due_at) <= (b.queue, statement_timestamp())
        AND due_at IS NOT NULL
        AND NOT (stream = ANY(%s))
        AND (rescues = 0
             OR (rescues = 1
                 AND (locked_by IS NULL
                      OR locked_by = %s)))
      ORDER BY queue, due_at
      LIMIT b.n
      FOR UPDATE SKIP LOCKED) chosen)
UPDATE "outbox_stream" e
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = statement_timestamp(),
                          due_at = statement_timestamp() + %s * interval '1 second'
FROM
before,
  (SELECT set_config('synchronous_commit', 'off', true)) unflushed
WHERE e.stream = before.stream RETURNING e.stream, e.queue, e.rescues, before.due_at AT TIME ZONE 'UTC', before.locked_by,
                                                                                                         e.locked_at AT TIME ZONE 'UTC';

-- read streams

SELECT s.stream, s.seq, statement_timestamp() AT TIME ZONE 'UTC', e.id, e.attempts, e.rescues, e.listener,
                                                                  e.routes, e.queue, e.history, e.occurred_at AT TIME ZONE 'UTC', e.created_at AT TIME ZONE 'UTC', e.deliver_at AT TIME ZONE 'UTC', e.first_due_at AT TIME ZONE 'UTC', e.event_id,
                                                                                                                                                                                                                                       e.event_type,
                                                                                                                                                                                                                                       e.aggregate_type,
                                                                                                                                                                                                                                       e.aggregate_id,
                                                                                                                                                                                                                                       e.tenant_id,
                                                                                                                                                                                                                                       e.payload,
                                                                                                                                                                                                                                       e.headers,
                                                                                                                                                                                                                                       e.unique_key,
                                                                                                                                                                                                                                       e.key,
                                                                                                                                                                                                                                       e.stream,
                                                                                                                                                                                                                                       e.seq,
                                                                                                                                                                                                                                       e.status,
                                                                                                                                                                                                                                       e.routed_until
FROM "outbox_stream" s
LEFT JOIN LATERAL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, key,
          stream, seq, status,

     (SELECT MIN(u.seq)
      FROM "outbox_event" u
      WHERE u.stream = '?:' || s.key
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= statement_timestamp()
             OR u.locked_by IS NOT NULL)) AS routed_until
   FROM "outbox_event" e
   WHERE e.stream = s.stream
     AND status IN (0, 2)
   ORDER BY e.seq
   LIMIT %s) e ON true
WHERE s.stream = ANY(%s)
  AND s.locked_by = %s
  AND s.locked_at = ANY(%s::timestamptz[])
ORDER BY s.stream, e.seq;

-- read streams, dead and due alone

SELECT s.stream, s.seq, statement_timestamp() AT TIME ZONE 'UTC', e.id, e.attempts, e.rescues, e.listener,
                                                                  e.routes, e.queue, e.history, e.occurred_at AT TIME ZONE 'UTC', e.created_at AT TIME ZONE 'UTC', e.deliver_at AT TIME ZONE 'UTC', e.first_due_at AT TIME ZONE 'UTC', e.event_id,
                                                                                                                                                                                                                                       e.event_type,
                                                                                                                                                                                                                                       e.aggregate_type,
                                                                                                                                                                                                                                       e.aggregate_id,
                                                                                                                                                                                                                                       e.tenant_id,
                                                                                                                                                                                                                                       e.payload,
                                                                                                                                                                                                                                       e.headers,
                                                                                                                                                                                                                                       e.unique_key,
                                                                                                                                                                                                                                       e.key,
                                                                                                                                                                                                                                       e.stream,
                                                                                                                                                                                                                                       e.seq,
                                                                                                                                                                                                                                       e.status,
                                                                                                                                                                                                                                       e.routed_until
FROM "outbox_stream" s
LEFT JOIN LATERAL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, key,
          stream, seq, status,

     (SELECT MIN(u.seq)
      FROM "outbox_event" u
      WHERE u.stream = '?:' || s.key
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= statement_timestamp()
             OR u.locked_by IS NOT NULL)) AS routed_until
   FROM "outbox_event" e
   WHERE e.stream = s.stream
     AND status IN (0, 2, 3)
     AND (status <> 2
          OR deliver_at <= statement_timestamp())
   ORDER BY e.seq
   LIMIT %s) e ON true
WHERE s.stream = ANY(%s)
  AND s.locked_by = %s
  AND s.locked_at = ANY(%s::timestamptz[])
ORDER BY s.stream, e.seq;

-- next retries

SELECT stream, MIN(deliver_at) AT TIME ZONE 'UTC'
FROM "outbox_event"
WHERE stream = ANY(%s)
  AND status = 2
  AND status IN (0, 2, 3)
  AND NOT EXISTS
    (SELECT 1
     FROM "outbox_event" dead
     WHERE dead.stream = "outbox_event".stream
       AND dead.seq < "outbox_event".seq
       AND dead.status = 3
       AND dead.status IN (0, 2, 3))
GROUP BY stream;

-- renew

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET available_at = statement_timestamp() + %s * interval '1 second'
FROM unlocked
WHERE e.id = unlocked.id;

SELECT statement_timestamp() AT TIME ZONE 'UTC';

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET available_at = statement_timestamp() + %s * interval '1 second'
FROM unlocked
WHERE e.id = unlocked.id;

SELECT id, available_at >= %s
FROM "outbox_event"
WHERE id = ANY(%s)
  AND locked_by = %s
  AND locked_at = ANY(%s::timestamptz[]);

-- renew streams

WITH unlocked AS MATERIALIZED
  (SELECT stream
   FROM "outbox_stream" e
   WHERE stream = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_stream" e
SET due_at = statement_timestamp() + %s * interval '1 second'
FROM unlocked
WHERE e.stream = unlocked.stream;

SELECT statement_timestamp() AT TIME ZONE 'UTC';

WITH unlocked AS MATERIALIZED
  (SELECT stream
   FROM "outbox_stream" e
   WHERE stream = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_stream" e
SET due_at = statement_timestamp() + %s * interval '1 second'
FROM unlocked
WHERE e.stream = unlocked.stream;

SELECT stream, due_at >= %s
FROM "outbox_stream"
WHERE stream = ANY(%s)
  AND locked_by = %s
  AND locked_at = ANY(%s::timestamptz[]);

-- release

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET available_at = statement_timestamp() + %s * interval '1 second', locked_by = NULL, locked_at = NULL
FROM unlocked
WHERE e.id = unlocked.id;

-- release when the lease ends

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET locked_by = NULL, locked_at = NULL
FROM unlocked
WHERE e.id = unlocked.id;

-- release each as it was

WITH v AS MATERIALIZED
  (SELECT v.*
   FROM unnest(%s::text[], %s::timestamptz[], %s::timestamptz[], %s::text[]) v (id,
                                                                                locked_at, due_at, queue), LATERAL
     (SELECT e.id
      FROM "outbox_event" e
      WHERE e.id = v.id
        AND e.status IN (0, 2)
        AND e.locked_by = %s
        AND e.locked_at = v.locked_at
        FOR
        UPDATE SKIP LOCKED) locked
   WHERE locked.id = v.id)
UPDATE "outbox_event" e
SET available_at = v.due_at, queue = v.queue, locked_by = NULL, locked_at = NULL
FROM v
WHERE e.id = v.id;

SELECT id
FROM "outbox_event"
WHERE id = ANY(%s)
  AND locked_by = %s
  AND locked_at = ANY(%s::timestamptz[]);

-- release streams

WITH v AS MATERIALIZED
  (SELECT v.*
   FROM unnest(%s::text[], %s::bigint[], %s::timestamptz[], %s::float8[], %s::text[], %s::int[]) v (stream,
                                                                                                    seq,
                                                                                                    locked_at,
                                                                                                    delay,
                                                                                                    queue,
                                                                                                    kept),
                                                                                                 LATERAL
     (SELECT e.stream
      FROM "outbox_stream" e
      WHERE e.stream = v.stream
        AND e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)
        AND e.locked_by = %s
        AND e.locked_at = v.locked_at
        FOR
        UPDATE SKIP LOCKED) locked
   WHERE locked.stream = v.stream)
UPDATE "outbox_stream" e
SET due_at = statement_timestamp() + NULLIF(v.delay, -1) * interval '1 second', queue = COALESCE(NULLIF(v.queue,
                                                                                                   ''),
                                                                                          e.queue), rescues = e.rescues * v.kept, locked_by = NULL,
    locked_at = statement_timestamp()
FROM v
WHERE e.stream = v.stream RETURNING e.stream;

-- hand streams back

WITH unlocked AS MATERIALIZED
  (SELECT stream
   FROM "outbox_stream" e
   WHERE stream = ANY(%s)
     AND locked_by = %s
     AND locked_at = ANY(%s::timestamptz[])
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_stream" e
SET due_at = statement_timestamp() + %s * interval '1 second', locked_by = NULL, locked_at = statement_timestamp()
FROM unlocked
WHERE e.stream = unlocked.stream;

-- settle as done

UPDATE "outbox_event" AS e
SET status = 1, done_at = statement_timestamp(), available_at = NULL, locked_by = NULL, locked_at = NULL
WHERE id = ANY(%s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s;

-- settle as done, with a key

UPDATE "outbox_event" AS e
SET status = 1, done_at = statement_timestamp(), available_at = NULL, locked_by = NULL, locked_at = NULL
WHERE id = ANY(%s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM "outbox_stream" owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       OFFSET 0);

-- delete what is done

DELETE
FROM "outbox_event" AS e
WHERE id = ANY(%s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND unique_key IS NULL;

-- settle

WITH v AS MATERIALIZED
  (SELECT v.*
   FROM (
         VALUES (%s::text, %s::timestamptz, %s::int, %s::smallint, %s::int, %s::float8, %s::text, %s::text, %s::text,
                 %s::text), (%s::text, %s::timestamptz, %s::int, %s::smallint, %s::int, %s::float8, %s::text,
                             %s::text, %s::text, %s::text)) v (id,
                                                               locked_at, attempts, status, spent, delay,
                                                               error, cause, history, queue), LATERAL
     (SELECT e.id
      FROM "outbox_event" e
      WHERE e.id = v.id
        AND e.attempts = v.attempts
        AND e.status IN (0, 2)
        AND e.locked_by = %s
        AND e.locked_at = v.locked_at
        FOR
        UPDATE) locked
   WHERE locked.id = v.id)
UPDATE "outbox_event" e
SET status = v.status, attempts = e.attempts + v.spent, rescues = 0,
    available_at = statement_timestamp() + v.delay * interval '1 second', done_at = CASE
                                                                                        WHEN v.delay IS NULL THEN statement_timestamp()
                                                                                    END,
                                                                                    last_error = COALESCE(v.error,

                                                                                                   e.last_error),
                                                                                    cause = COALESCE(v.cause,
                                                                                              e.cause),
                                                                                    history = COALESCE(v.history,

                                                                                                e.history),
                                                                                    queue = COALESCE(v.queue,
                                                                                              e.queue),
                                                                                    locked_by = NULL,
                                                                                    locked_at = NULL
FROM v
WHERE e.id = v.id;

-- settle, with a key

WITH v AS MATERIALIZED
  (SELECT v.*
   FROM (
         VALUES (%s::text, %s::timestamptz, %s::int, %s::smallint, %s::int, %s::float8, %s::text, %s::text, %s::text,
                 %s::text), (%s::text, %s::timestamptz, %s::int, %s::smallint, %s::int, %s::float8, %s::text,
                             %s::text, %s::text, %s::text)) v (id,
                                                               locked_at, attempts, status, spent, delay,
                                                               error, cause, history, queue), LATERAL
     (SELECT e.id
      FROM "outbox_event" e
      WHERE e.id = v.id
        AND e.attempts = v.attempts
        AND e.status IN (0, 2)
        AND EXISTS
          (SELECT 1
           FROM "outbox_stream" owned
           WHERE owned.stream = e.stream
             AND owned.locked_by = %s
             AND owned.locked_at = v.locked_at
             OFFSET 0)
        FOR
        UPDATE) locked
   WHERE locked.id = v.id)
UPDATE "outbox_event" e
SET status = v.status, attempts = e.attempts + v.spent, rescues = 0,
    deliver_at = statement_timestamp() + v.delay * interval '1 second', done_at = CASE
                                                                                      WHEN v.delay IS NULL THEN statement_timestamp()
                                                                                  END,
                                                                                  last_error = COALESCE(v.error,

                                                                                                 e.last_error),
                                                                                  cause = COALESCE(v.cause,
                                                                                            e.cause),
                                                                                  history = COALESCE(v.history,

                                                                                              e.history),
                                                                                  queue = COALESCE(v.queue,
                                                                                            e.queue), locked_by = NULL,
                                                                                  locked_at = NULL
FROM v
WHERE e.id = v.id;

-- route rows

UPDATE "outbox_event" AS e
SET listener = %s, routes = %s, queue = %s, stream = CASE WHEN key IS NOT NULL THEN %s || key
                                                         WHEN stream IS NOT NULL THEN %s || SUBSTR(stream,
                                                                                              15)
                                                     END, available_at = CASE
                                                                             WHEN key IS NULL THEN available_at
                                                                         END, locked_by = CASE
                                                                                              WHEN key IS NULL THEN locked_by
                                                                                          END, locked_at = CASE
                                                                                                               WHEN key IS NULL THEN locked_at
                                                                                                           END
WHERE listener IS NULL
  AND id = ANY(%s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM "outbox_stream" owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       AND owned.locked_at = ANY(%s::timestamptz[])
       OFFSET 0);

-- add rows

INSERT INTO "outbox_event" (id, listener, routes, queue, stream, first_due_at, available_at, deliver_at,
                            status, attempts, rescues, event_id, event_type, aggregate_type, aggregate_id,
                            tenant_id, payload, headers, occurred_at, created_at, key, seq)
SELECT event_id || %s, %s, %s, %s,
       CASE WHEN key IS NOT NULL THEN %s || key WHEN stream IS NOT NULL THEN %s || SUBSTR(stream,
                                                                                     15)
       END, statement_timestamp(), CASE WHEN key IS NULL THEN statement_timestamp()
                                   END,
       CASE WHEN key IS NULL THEN deliver_at
       END, 0, 0, 0, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, occurred_at,
       created_at, key, seq
FROM "outbox_event"
WHERE id = ANY(%s)
  AND routes = %s ON CONFLICT (id) DO NOTHING;

-- lock an event

SELECT id
FROM "outbox_event" AS e
WHERE id >= %s
  AND id < %s
  AND event_id = %s;

-- lock rows

SELECT id, event_id, routes
FROM "outbox_event" AS e
WHERE id = ANY(%s)
ORDER BY id
FOR
UPDATE;

-- note a receipt

UPDATE "outbox_event" AS e
SET routes = %s
WHERE id = ANY(%s);

-- note a lost worker

UPDATE "outbox_event" AS e
SET rescues = %s, history = CASE WHEN history IS NULL THEN %s ELSE SUBSTR(history,
                                                                     1, LENGTH(history) - 1) || %s
                            END
WHERE id = ANY(%s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at = ANY(%s::timestamptz[]);

-- keep a stream suspected

UPDATE "outbox_stream" AS e
SET rescues = %s
WHERE stream = ANY(%s)
  AND locked_by = %s
  AND locked_at = ANY(%s::timestamptz[]);

-- read what is pending in slots

(SELECT stream, seq, id, locked_by
   FROM "outbox_event"
   WHERE stream = %s
     AND status IN (0, 2)
     AND status IN (0, 2, 3)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000)
UNION ALL
  (SELECT stream, seq, id, locked_by
   FROM "outbox_event"
   WHERE stream = %s
     AND status IN (0, 2)
     AND status IN (0, 2, 3)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000);

-- lease the newest of slots

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND status IN (0, 2)
     AND (locked_by IS NULL
          AND queue NOT LIKE 'paused:%%'
          AND rescues < 2)
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET rescues = CASE WHEN rescues < %s THEN %s ELSE rescues
              END, locked_by = %s, locked_at = %s,
              available_at = statement_timestamp() + %s * interval '1 second'
FROM unlocked
WHERE e.id = unlocked.id;

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at AT TIME ZONE 'UTC', created_at AT TIME ZONE 'UTC', deliver_at AT TIME ZONE 'UTC', first_due_at AT TIME ZONE 'UTC', event_id,
                                                                                                                                                                                               event_type,
                                                                                                                                                                                               aggregate_type,
                                                                                                                                                                                               aggregate_id,
                                                                                                                                                                                               tenant_id,
                                                                                                                                                                                               payload,
                                                                                                                                                                                               headers,
                                                                                                                                                                                               unique_key,
                                                                                                                                                                                               key,
                                                                                                                                                                                               stream
FROM "outbox_event" AS e
WHERE id = ANY(%s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at = ANY(%s::timestamptz[]);

-- end what is coalesced

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND status IN (0, 2)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR (locked_by = %s
              AND locked_at = %s))
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET status = 1, done_at = statement_timestamp(), available_at = NULL, result = %s, locked_by = NULL,
                                                                               locked_at = NULL
FROM unlocked
WHERE e.id = unlocked.id;

-- find suspects

(SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_event"
      WHERE (queue, available_at) >= (%s, '-infinity')
        AND (queue, available_at) <= (%s, statement_timestamp())
        AND available_at IS NOT NULL
      ORDER BY queue, available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_event"
      WHERE (queue, available_at) >= (%s, '-infinity')
        AND (queue, available_at) <= (%s, statement_timestamp())
        AND available_at IS NOT NULL
      ORDER BY queue, available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_stream"
      WHERE (queue, due_at) >= (%s, '-infinity')
        AND (queue, due_at) <= (%s, statement_timestamp())
        AND due_at IS NOT NULL
      ORDER BY queue, due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM "outbox_stream"
      WHERE (queue, due_at) >= (%s, '-infinity')
        AND (queue, due_at) <= (%s, statement_timestamp())
        AND due_at IS NOT NULL
      ORDER BY queue, due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)));

-- when is the next due

(SELECT queue, available_at AT TIME ZONE 'UTC', statement_timestamp() AT TIME ZONE 'UTC'
   FROM "outbox_event"
   WHERE (queue, available_at) >= (%s, statement_timestamp() + %s * interval '1 second')
     AND (queue, available_at) <= (%s, 'infinity')
     AND available_at IS NOT NULL
   ORDER BY queue, available_at, id
   LIMIT 1)
UNION ALL
  (SELECT queue, due_at AT TIME ZONE 'UTC', statement_timestamp() AT TIME ZONE 'UTC'
   FROM "outbox_stream"
   WHERE (queue, due_at) >= (%s, statement_timestamp() + %s * interval '1 second')
     AND (queue, due_at) <= (%s, 'infinity')
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- is anything due

(SELECT queue, available_at AT TIME ZONE 'UTC', statement_timestamp() AT TIME ZONE 'UTC'
   FROM "outbox_event"
   WHERE (queue, available_at) >= (%s, '-infinity')
     AND (queue, available_at) <= (%s, statement_timestamp())
     AND available_at IS NOT NULL
   ORDER BY queue, available_at, id
   LIMIT 1)
UNION ALL
  (SELECT queue, due_at AT TIME ZONE 'UTC', statement_timestamp() AT TIME ZONE 'UTC'
   FROM "outbox_stream"
   WHERE (queue, due_at) >= (%s, '-infinity')
     AND (queue, due_at) <= (%s, statement_timestamp())
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- other queues

(SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

(SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- move events

SELECT id
FROM "outbox_event"
WHERE (queue, available_at) >= (%s, '-infinity')
  AND (queue, available_at) <= (%s, statement_timestamp())
  AND available_at IS NOT NULL
ORDER BY queue, available_at, id
LIMIT %s;

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND queue = %s
     AND available_at <= statement_timestamp()
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET queue = %s
FROM unlocked
WHERE e.id = unlocked.id;

-- move streams

SELECT stream
FROM "outbox_stream"
WHERE (queue, due_at) >= (%s, '-infinity')
  AND (queue, due_at) <= (%s, statement_timestamp())
  AND due_at IS NOT NULL
ORDER BY queue, due_at
LIMIT %s;

WITH unlocked AS MATERIALIZED
  (SELECT stream
   FROM "outbox_stream" e
   WHERE stream = ANY(%s)
     AND queue = %s
     AND due_at <= statement_timestamp()
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_stream" e
SET queue = %s
FROM unlocked
WHERE e.stream = unlocked.stream;

-- wake streams

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %s, statement_timestamp(), %s),
       (%s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %s, statement_timestamp(), %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE
                WHEN ("outbox_stream".due_at IS NULL
                      OR "outbox_stream".queue LIKE 'paused:%%') THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (extract(epoch
                                                                    FROM statement_timestamp()) * 1000000)::bigint, due_at = CASE
                                                                                                                                 WHEN "outbox_stream".locked_by IS NULL THEN statement_timestamp()
                                                                                                                                 ELSE "outbox_stream".due_at
                                                                                                                             END;

-- number events

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %s, statement_timestamp(), %s),
       (%s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %s, NULL, %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE WHEN "outbox_stream".due_at IS NULL THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (extract(epoch
                                                                    FROM statement_timestamp()) * 1000000)::bigint, due_at = CASE
                                                                                                                                 WHEN EXCLUDED.due_at IS NULL THEN "outbox_stream".due_at
                                                                                                                                 ELSE COALESCE("outbox_stream".due_at,

                                                                                                                                        statement_timestamp())
                                                                                                                             END RETURNING stream,
                                                                                                                                           seq;

-- what is due first

(SELECT id, event_type, listener, key
   FROM "outbox_event"
   WHERE (queue, available_at) >= (%s, '-infinity')
     AND (queue, available_at) <= (%s, statement_timestamp())
     AND available_at IS NOT NULL
   ORDER BY queue, available_at, id
   LIMIT %s)
UNION ALL
  (SELECT id, event_type, listener, key
   FROM "outbox_event"
   WHERE (queue, available_at) >= (%s, '-infinity')
     AND (queue, available_at) <= (%s, statement_timestamp())
     AND available_at IS NOT NULL
   ORDER BY queue, available_at, id
   LIMIT %s);

-- park rows

SELECT id
FROM "outbox_pause"
WHERE id = ANY(%s)
  FOR SHARE;

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND locked_by IS NULL
     AND available_at IS NOT NULL
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET queue = %s
FROM unlocked
WHERE e.id = unlocked.id;

-- park streams

SELECT id
FROM "outbox_pause"
WHERE id = ANY(%s)
  FOR SHARE;

WITH v AS MATERIALIZED
  (SELECT v.*
   FROM unnest(%s::text[], %s::bigint[], %s::timestamptz[], %s::float8[], %s::text[], %s::int[]) v (stream,
                                                                                                    seq,
                                                                                                    locked_at,
                                                                                                    delay,
                                                                                                    queue,
                                                                                                    kept),
                                                                                                 LATERAL
     (SELECT e.stream
      FROM "outbox_stream" e
      WHERE e.stream = v.stream
        AND e.seq = COALESCE(NULLIF(v.seq, -1), e.seq)
        AND e.locked_by = %s
        AND e.locked_at = v.locked_at
        FOR
        UPDATE SKIP LOCKED) locked
   WHERE locked.stream = v.stream)
UPDATE "outbox_stream" e
SET due_at = statement_timestamp() + NULLIF(v.delay, -1) * interval '1 second', queue = COALESCE(NULLIF(v.queue,
                                                                                                   ''),
                                                                                          e.queue), rescues = e.rescues * v.kept, locked_by = NULL,
    locked_at = statement_timestamp()
FROM v
WHERE e.stream = v.stream RETURNING e.stream;

-- bring rows home

SELECT id
FROM "outbox_event"
WHERE (queue, available_at) >= (%s, '-infinity')
  AND (queue, available_at) <= (%s, 'infinity')
  AND available_at IS NOT NULL
  AND available_at IS NOT NULL
ORDER BY queue, available_at, id
LIMIT %s;

SELECT id, listener, queue
FROM "outbox_event" AS e
WHERE id = ANY(%s);

WITH unlocked AS MATERIALIZED
  (SELECT id
   FROM "outbox_event" e
   WHERE id = ANY(%s)
     AND queue = %s
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_event" e
SET queue = %s, first_due_at = CASE WHEN e.available_at > statement_timestamp() THEN e.first_due_at ELSE statement_timestamp()
                               END
FROM unlocked
WHERE e.id = unlocked.id;

-- bring streams home

SELECT stream
FROM "outbox_stream"
WHERE (queue, due_at) >= (%s, '-infinity')
  AND (queue, due_at) <= (%s, 'infinity')
  AND due_at IS NOT NULL
  AND due_at IS NOT NULL
ORDER BY queue, due_at
LIMIT %s;

SELECT stream, seq, id
FROM "outbox_event"
WHERE stream = %s
  AND status IN (0, 2)
  AND status IN (0, 2, 3)
ORDER BY seq
LIMIT 1;

SELECT id, listener, queue
FROM "outbox_event" AS e
WHERE id = ANY(%s);

WITH unlocked AS MATERIALIZED
  (SELECT stream
   FROM "outbox_stream" e
   WHERE stream = ANY(%s)
     AND queue = %s
     FOR
     UPDATE SKIP LOCKED)
UPDATE "outbox_stream" e
SET queue = %s
FROM unlocked
WHERE e.stream = unlocked.stream;

-- what is parked without its pause

SELECT id
FROM "outbox_pause";

(SELECT queue
   FROM "outbox_event"
   WHERE queue > %s
     AND queue < %s
     AND available_at IS NOT NULL
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM "outbox_stream"
   WHERE queue > %s
     AND queue < %s
     AND due_at IS NOT NULL
   ORDER BY queue, due_at
   LIMIT 1);

-- give streams a new version

INSERT INTO "outbox_stream" (stream, key, lane, seq, due_at, queue)
VALUES (%s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %s, statement_timestamp(), %s) ON CONFLICT (stream) DO
UPDATE
SET queue = CASE WHEN "outbox_stream".due_at IS NULL THEN EXCLUDED.queue ELSE "outbox_stream".queue
            END,
            seq = "outbox_stream".seq + 1 + EXCLUDED.seq - (extract(epoch
                                                                    FROM statement_timestamp()) * 1000000)::bigint, due_at = COALESCE("outbox_stream".due_at,

                                                                                                                               statement_timestamp());

-- take a named lease

UPDATE "outbox_lease"
SET locked_by = %s, locked_until = statement_timestamp() + %s * interval '1 second'
WHERE name = %s
  AND (locked_by = %s
       OR locked_by IS NULL
       OR locked_until <= statement_timestamp());

INSERT INTO "outbox_lease" (name)
VALUES (%s) ON CONFLICT DO NOTHING;

-- renew a named lease

UPDATE "outbox_lease"
SET state = %s, locked_by = %s, locked_until = statement_timestamp() + %s * interval '1 second'
WHERE name = %s
  AND locked_by = %s;

-- release a named lease

UPDATE "outbox_lease"
SET state = %s, locked_by = NULL, locked_until = NULL
WHERE name = %s
  AND locked_by = %s;

-- what is paused

SELECT id, kind, name, statement_timestamp() AT TIME ZONE 'UTC', until AT TIME ZONE 'UTC', pause_seconds
FROM "outbox_pause"
UNION ALL
SELECT id, 'operation', '', statement_timestamp() AT TIME ZONE 'UTC', NULL, NULL
FROM "outbox_operation"
WHERE state = 'open';

-- open a breaker

INSERT INTO "outbox_pause" (kind, name, reason, paused_at, paused_by, until, pause_seconds)
VALUES ('breaker', %s, %s, statement_timestamp(), '', statement_timestamp() + %s * interval '1 second', %s) ON CONFLICT DO NOTHING;

-- win the probe of a breaker

UPDATE "outbox_pause"
SET until = statement_timestamp() + %s * interval '1 second'
WHERE kind = 'breaker'
  AND name = %s
  AND until <= statement_timestamp();

-- prolong a breaker

UPDATE "outbox_pause"
SET until = statement_timestamp() + %s * interval '1 second', pause_seconds = %s
WHERE kind = 'breaker'
  AND name = %s;

-- close a breaker

DELETE
FROM "outbox_pause"
WHERE kind = 'breaker'
  AND name = %s;

-- receive a message

INSERT INTO "outbox_inbox" (source, message_id, received_at)
VALUES (%s, %s, statement_timestamp()) ON CONFLICT DO NOTHING;

-- delete events

DELETE
FROM "outbox_event" AS e
WHERE id = ANY(%s);

-- delete streams

DELETE
FROM "outbox_stream" AS e
WHERE stream = ANY(%s);
